"""``compact_tokens``: chosen tokens of one sequence, side by side in other pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bicl.cache.layout import PageLayout
from bicl.errors import InvalidInputError
from bicl.ops.cpu.addressing import as_units, row_index, row_unit

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
        InvalidInputError: the layouts differ, or the target pages do not hold the tokens.
    """
    layout = source.layout
    if target.layout != layout:
        raise InvalidInputError(
            f"source and target must have one layout, got {layout} and {target.layout}"
        )
    tokens, size = positions.shape[1], layout.page_size
    if target_pages.shape[0] * size < tokens:
        raise InvalidInputError(
            f"{tokens} tokens need {-(-tokens // size)} pages; target_pages has "
            f"{target_pages.shape[0]}"
        )
    unit = row_unit(layout)
    order = torch.arange(tokens).expand(layout.num_kv_heads, tokens)
    read = _rows(layout, page_table, positions.long())
    written = _rows(layout, target_pages, order)
    rows = as_units(source.pages, unit).index_select(0, read)
    as_units(target.pages, unit).index_copy_(0, written, rows)


def _rows(layout: PageLayout, pages: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Flat index of the K and V rows of token ``positions[h, i]`` of each head, head by head."""
    first = pages.long()[positions // layout.page_size] * layout.page_size
    slots = (first + positions % layout.page_size).numpy()
    heads, tokens = positions.shape
    parts = [
        row_index(layout, slots[head]).view(tokens, heads, -1)[:, head].reshape(-1)
        for head in range(heads)
    ]
    return torch.cat(parts)
