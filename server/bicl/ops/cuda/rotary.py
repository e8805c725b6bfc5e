"""Rotary position embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bicl.ops.cuda import library
from bicl.ops.cuda.sparse import store_and_index
from bicl.ops.cuda.store_kv import store_kv

if TYPE_CHECKING:
    from bicl.attention.pool import LayerCache

__all__ = ["rotate", "rotate_and_store"]


def rotate(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Turns dims ``i`` and ``i + R / 2`` of each head together, in place, for ``i < R / 2``.

    Computed in float32 and rounded once. Dims from ``R`` on stay as they are.

    Args:
        query: ``[T, num_q_heads, head_dim]``; key: ``[T, num_kv_heads, head_dim]``; float16 or
            bfloat16, any strides but 1 in the last dim.
        cos, sin: ``[T, R]``, the same dtype.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; the message names them.
    """
    library.module().rotate(query, key, cos, sin, True)


def rotate_and_store(
    layer: LayerCache,
    query: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    *,
    records: torch.Tensor | None = None,
    choice_follows: bool = False,
    pdl: bool = False,
) -> None:
    """:func:`rotate`, then ``store_kv`` or ``store_and_index``: in one launch, which leaves ``key``
    as it was, or, where pages are fp8 or padded, or rows are not aligned, in two. Bit for bit the
    same.

    Args:
        records, choice_follows: with records ``store_and_index``, which see.
        pdl: start before the kernel ahead has ended; it is waited for before anything is read.
    """
    rows, where = (query, key, value, cos, sin, layer.pages), (slots, layer.layout.page_size, pdl)
    if records is None:
        if not library.module().rotate_and_store(*rows, *where):
            rotate(query, key, cos, sin)
            store_kv(layer, key, value, slots, pdl=pdl)
    elif not library.module().rotate_store_and_index(*rows, records, *where, choice_follows):
        rotate(query, key, cos, sin)
        early = {"choice_follows": choice_follows, "pdl": pdl}
        store_and_index(layer, records, key, value, slots, **early)
