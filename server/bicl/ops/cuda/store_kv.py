"""Rows of K and V into pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bicl.ops.cuda import library

if TYPE_CHECKING:
    from bicl.attention.pool import LayerCache

__all__ = ["store_kv"]


def store_kv(
    layer: LayerCache,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    *,
    pdl: bool = False,
) -> None:
    """Writes ``layer.pages`` at ``slots`` (int64 ``[T]``, negative: skip; duplicates allowed).

    Args:
        key, value: ``[T, H, head_dim]``, any strides but 1 in the last dim; the pages' dtype, or
            fp32, fp16 or bf16 into fp8 (divided by the scale, saturated).
        pdl: start before the kernel ahead has ended; it is waited for before anything is read.
    """
    library.module().store_kv(
        key,
        value,
        layer.pages,
        slots,
        layer.layout.page_size,
        layer.k_scale,
        layer.v_scale,
        pdl,
    )
