"""Where the CPU operators find rows and planes: flat indexes made from the page layout.

Everything is read and written in *units*, the longest run of elements that the layout leaves
contiguous: a whole K or V plane (plain rows, one dim tile), a tile row (plain rows, several dim
tiles) or a 16-byte chunk (swizzled rows). One ``index_select`` or ``index_copy_`` over a
``[-1, unit]`` view then serves every layout, and costs a plain memory copy on the layout that the
CPU backend gives its own pools.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from bicl.cache.layout import PageLayout
from bicl.errors import InvalidInputError, UnsupportedError

__all__ = ["as_units", "plane_index", "row_index", "row_unit"]


def row_unit(layout: PageLayout) -> int:
    """Elements of one token's row that lie together."""
    return layout.chunk_elements if layout.swizzle else layout.tile


def _plane_unit(layout: PageLayout) -> int:
    """Elements of one plane that lie together in token-major order."""
    if layout.dim_tiles == 1 and not layout.swizzle:
        return layout.page_size * layout.padded_head_dim
    return row_unit(layout)


@lru_cache(maxsize=64)
def _unit_offsets(layout: PageLayout, unit: int) -> torch.Tensor:
    """int64: where each unit of a plane is stored, in units, in token-major order."""
    offsets = layout.plane_offsets.reshape(-1)[::unit] // unit
    return torch.from_numpy(offsets.copy())


def _plane_base(layout: PageLayout, page: torch.Tensor) -> torch.Tensor:
    """Number of each plane, ``[*page.shape, H, 2]``."""
    if layout.planes != 2:
        raise UnsupportedError(
            f"the CPU operators read pages of 2 planes (K and V), got planes={layout.planes}; "
            "latent (MLA) pages are not available on the CPU backend"
        )
    heads, planes = layout.num_kv_heads, layout.planes
    inner = torch.arange(heads * planes).view(heads, planes)
    return page.long()[..., None, None] * (heads * planes) + inner


def plane_index(layout: PageLayout, page_ids: torch.Tensor) -> torch.Tensor:
    """Flat index that loads pages head by head.

    Args:
        page_ids: ``[chunks, pages]``.

    Returns:
        int64 ``[chunks * H * 2 * pages * units]``; the rows it selects from ``as_units`` form
        ``[chunks, H, 2, pages * page_size, padded_head_dim]``.
    """
    unit = _plane_unit(layout)
    units = layout.page_size * layout.padded_head_dim // unit
    planes = _plane_base(layout, page_ids).permute(0, 2, 3, 1)
    return (planes[..., None] * units + _unit_offsets(layout, unit)).reshape(-1)


def row_index(layout: PageLayout, slots: torch.Tensor) -> torch.Tensor:
    """Flat index of the rows at ``slots`` (int64 ``[T]``, none negative).

    Returns:
        int64 ``[T * H * 2 * D / unit]``, for rows in the order ``[T, H, 2, D]``.
    """
    unit = row_unit(layout)
    per_row = layout.padded_head_dim // unit
    offsets = _unit_offsets(layout, unit).view(layout.page_size, per_row)
    page = torch.div(slots, layout.page_size, rounding_mode="floor")
    planes = _plane_base(layout, page)[..., None] * (layout.page_size * per_row)
    return (planes + offsets[slots % layout.page_size][:, None, None, :]).reshape(-1)


def as_units(pages: torch.Tensor, layout: PageLayout, *, rows: bool) -> torch.Tensor:
    """``pages`` as ``[-1, unit]``; fp8 as bytes, since index operators do not know fp8."""
    if not pages.is_contiguous():
        raise InvalidInputError("pages must be contiguous; pass the pool's own tensor")
    if layout.element_bytes == 1:
        pages = pages.view(torch.uint8)
    return pages.view(-1, row_unit(layout) if rows else _plane_unit(layout))
