"""``PageLoader`` and ``gather_kv``: pages back to token-major rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from bicl.cache.layout import PageLayout
from bicl.ops.cpu.addressing import as_units, plane_index, plane_unit

__all__ = ["PageLoader", "Scratch", "gather_kv"]


class Scratch:
    """Memory that is filled anew by one user after the other.

    Kept through a step: fresh memory of this size is paged in by the kernel at every call, which
    costs as much as the copy.
    """

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """``count`` elements; what was taken before is overwritten."""
        size = count * dtype.itemsize
        if self._bytes.numel() < size:
            # A tensor made in inference mode could not be written outside it.
            with torch.inference_mode(False):
                self._bytes = torch.empty(size, dtype=torch.uint8)
        return self._bytes[:size].view(dtype)


class PageLoader:
    """Copies the same pages of one layer after the other into the same memory.

    Args:
        index: from ``plane_index`` for ``chunks`` chunks of pages.
        dtype: of ``rows``. fp8 values come as stored, not yet multiplied by their scale.
        scratch: the memory.

    Attributes:
        rows: ``[chunks, H, 2, tokens, padded_head_dim]``, what ``load`` filled last.
    """

    def __init__(
        self,
        layout: PageLayout,
        index: torch.Tensor,
        chunks: int,
        dtype: torch.dtype,
        scratch: Scratch,
    ) -> None:
        unit = plane_unit(layout)
        shape = (chunks, layout.num_kv_heads, layout.planes, -1, layout.padded_head_dim)
        self._index = index
        memory = scratch.take(len(index) * unit, layout.dtype)
        self._unit = unit
        self._units = as_units(memory, unit)
        self._stored = memory.view(shape)
        same = dtype == layout.dtype
        self.rows = self._stored if same else torch.empty(self._stored.shape, dtype=dtype)

    def load(self, pages: torch.Tensor) -> None:
        """Fill ``rows`` from one layer's pages."""
        torch.index_select(as_units(pages, self._unit), 0, self._index, out=self._units)
        if self.rows is not self._stored:
            self.rows.copy_(self._stored)


def gather_kv(
    pages: torch.Tensor,
    layout: PageLayout,
    page_lists: Sequence[np.ndarray],
    lengths: Sequence[int],
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token-major K and V of several sequences, packed.

    Args:
        page_lists: the valid page ids of each sequence, ``ceil(length / page_size)`` each.
        lengths: tokens of each sequence.

    Returns:
        K and V, each ``[sum(lengths), H, head_dim]``; dequantised to float32 for fp8 pages, else
        in the stored dtype.
    """
    size = layout.page_size
    fp8 = layout.element_bytes == 1
    dtype = torch.float32 if fp8 else layout.dtype
    page_ids = np.concatenate([np.empty(0, dtype=np.int64), *page_lists])
    loader = PageLoader(layout, plane_index(layout, page_ids[None]), 1, dtype, Scratch())
    loader.load(pages)
    starts = np.cumsum([0, *(len(p) for p in page_lists)])[:-1] * size
    spans = [np.arange(n) + start for n, start in zip(lengths, starts, strict=True)]
    tokens = torch.from_numpy(np.concatenate([np.empty(0, dtype=np.int64), *spans]))
    rows = loader.rows[0, ..., : layout.head_dim].permute(1, 2, 0, 3)[:, tokens]
    key, value = rows[0].contiguous(), rows[1].contiguous()
    return (key * k_scale, value * v_scale) if fp8 else (key, value)
