"""``store_kv``: rows of K and V to their slots."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from bicl.cache.layout import PageLayout
from bicl.errors import InvalidInputError
from bicl.ops.cpu.addressing import as_units, row_index, row_unit

__all__ = ["StoreIndex", "store_kv"]


class StoreIndex:
    """Addresses of one step's slots in one layout, shared by all layers that have it.

    Args:
        slots: int64 ``[T]``; negative entries store nothing.
        num_pages: pages of the pool.

    Raises:
        InvalidInputError: a slot lies past the pool's end.
    """

    def __init__(self, layout: PageLayout, slots: torch.Tensor, num_pages: int) -> None:
        places = slots.numpy()
        highest = int(places.max(initial=-1))
        if highest >= num_pages * layout.page_size:
            raise InvalidInputError(
                f"slot {highest} is outside the pool: {num_pages} pages of {layout.page_size} "
                f"tokens have slots 0..{num_pages * layout.page_size - 1}"
            )
        self.kept_rows = None
        if places.min(initial=0) < 0:
            kept = (places >= 0).nonzero()[0]
            self.kept_rows = torch.from_numpy(kept)
            places = places[kept]
        self.units = row_index(layout, places)


def store_kv(
    pages: torch.Tensor,
    layout: PageLayout,
    key: torch.Tensor,
    value: torch.Tensor,
    index: StoreIndex,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Write ``key`` and ``value`` ``[T, H, head_dim]`` into ``pages`` (mutated).

    fp8 pages hold ``value / scale``, saturated at the largest finite number; padding dims are
    written as zeros.
    """
    if index.kept_rows is not None:
        key, value = key[index.kept_rows], value[index.kept_rows]
    if layout.element_bytes == 1:
        key, value = _quantise(key, k_scale, layout), _quantise(value, v_scale, layout)
    elif key.dtype != layout.dtype:
        key, value = key.to(layout.dtype), value.to(layout.dtype)
    rows = torch.stack((key, value), dim=2)
    if layout.padded_head_dim != layout.head_dim:
        rows = F.pad(rows, (0, layout.padded_head_dim - layout.head_dim))
    unit = row_unit(layout)
    as_units(pages, unit).index_copy_(0, index.units, as_units(rows, unit))


def _quantise(rows: torch.Tensor, scale: float, layout: PageLayout) -> torch.Tensor:
    """fp8 bytes of ``rows / scale``; the cast alone would turn an overflow into NaN or inf."""
    limit = torch.finfo(layout.dtype).max
    scaled = rows.float() / scale
    return scaled.clamp(-limit, limit).to(layout.dtype).view(torch.uint8)
