"""Chosen tokens of one sequence, side by side in other pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bicl.ops.cuda import library

if TYPE_CHECKING:
    from bicl.attention.pool import LayerCache

__all__ = ["compact_tokens"]


def compact_tokens(
    source: LayerCache,
    page_table: torch.Tensor,
    positions: torch.Tensor,
    target: LayerCache,
    target_pages: torch.Tensor,
) -> None:
    """Copies token ``positions[h, i]`` of KV head ``h``, K and V as stored, to token ``i`` of the
    sequence that lies in ``target_pages``.

    Args:
        source, target: layers of one layout, in different pools or with disjoint pages.
        page_table: int32 ``[max_pages]``, the sequence's pages in ``source``.
        positions: int32 ``[H, n]``, tokens of the sequence.
        target_pages: int32, at least ``ceil(n / page_size)``.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; the message names them.
    """
    library.module().compact_tokens(
        source.pages, page_table, positions, target.pages, target_pages, source.layout.page_size
    )
