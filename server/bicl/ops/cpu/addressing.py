"""Where the CPU operators find rows and planes: flat indexes made from the page layout.

Host arithmetic in numpy, whose calls on a few numbers cost a third of torch's.

Everything is read and written in *units*, the longest run of elements that the layout leaves
contiguous: a whole K or V plane (plain rows, one dim tile), a tile row (plain rows, several dim
tiles) or a 16-byte chunk (swizzled rows). One ``index_select`` or ``index_copy_`` over a
``[-1, unit]`` view then serves every layout, and costs a plain memory copy on the layout that the
CPU backend gives its own pools.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from bicl.cache.layout import CHUNK_BYTES, PageLayout
from bicl.errors import InvalidInputError, UnsupportedError

__all__ = ["CHUNK", "as_units", "plane_index", "plane_unit", "row_index", "row_unit"]

# The torch dtype of 16 bytes; only ever moved, never computed on.
CHUNK = torch.complex128


def row_unit(layout: PageLayout) -> int:
    """Elements of one token's row that lie together."""
    return layout.chunk_elements if layout.swizzle else layout.tile


def plane_unit(layout: PageLayout) -> int:
    """Elements of one plane that lie together in token-major order."""
    if layout.dim_tiles == 1 and not layout.swizzle:
        return layout.page_size * layout.padded_head_dim
    return row_unit(layout)


@lru_cache(maxsize=64)
def _unit_offsets(layout: PageLayout, unit: int) -> np.ndarray:
    """int64: where each unit of a plane is stored, in units, in token-major order."""
    return layout.plane_offsets.reshape(-1)[::unit] // unit


@lru_cache(maxsize=64)
def _planes_of_page(layout: PageLayout) -> np.ndarray:
    """int64 ``[H, 2]``: number of each plane within a page."""
    if layout.planes != 2:
        raise UnsupportedError(
            f"the CPU operators read pages of 2 planes (K and V), got planes={layout.planes}; "
            "latent (MLA) pages are for bicl.attention.mla"
        )
    return np.arange(layout.num_kv_heads * 2, dtype=np.int64).reshape(-1, 2)


def plane_index(layout: PageLayout, page_ids: np.ndarray) -> torch.Tensor:
    """Flat index that loads pages head by head.

    Args:
        page_ids: integers ``[chunks, pages]``, or ``[chunks, H, pages]``: a list a KV head.

    Returns:
        int64 ``[chunks * H * 2 * pages * units]``; the rows it selects from ``as_units`` form
        ``[chunks, H, 2, pages * page_size, padded_head_dim]``.
    """
    planes = _planes_of_page(layout)
    unit = plane_unit(layout)
    units = layout.page_size * layout.padded_head_dim // unit
    if page_ids.ndim == 2:
        page_ids = page_ids[:, None]
    first = page_ids.astype(np.int64)[:, :, None, :] * planes.size + planes[:, :, None]
    if units > 1:
        first = first[..., None] * units + _unit_offsets(layout, unit)
    return torch.from_numpy(first.reshape(-1))


def row_index(layout: PageLayout, slots: np.ndarray) -> torch.Tensor:
    """Flat index of the rows at ``slots`` (int64 ``[T]``, none negative).

    Returns:
        int64 ``[T * H * 2 * D / unit]``, for rows in the order ``[T, H, 2, D]``.
    """
    planes = _planes_of_page(layout)
    unit = row_unit(layout)
    offsets = _unit_offsets(layout, unit).reshape(layout.page_size, -1)
    page, token = np.divmod(slots, layout.page_size)
    first = (page[:, None, None] * planes.size + planes) * offsets.size
    return torch.from_numpy((first[..., None] + offsets[token][:, None, None, :]).reshape(-1))


def as_units(pages: torch.Tensor, unit: int) -> torch.Tensor:
    """Memory of ``pages`` as rows of one unit each, ``[-1, unit bytes / 16]``.

    Elements are the 16-byte chunks of the layout, whatever they hold: index operators move the
    widest element four times as fast as fp32, eight times as fast as bf16, and fp8 not at all.
    """
    if not pages.is_contiguous():
        raise InvalidInputError("pages must be contiguous; pass the pool's own tensor")
    chunks = unit * pages.element_size() // CHUNK_BYTES
    return pages.view(-1).view(CHUNK).view(-1, chunks)
