"""``load_pages`` and ``gather_kv``: pages back to token-major rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from bicl.cache.layout import PageLayout
from bicl.ops.cpu.addressing import as_units, plane_index

__all__ = ["gather_kv", "load_pages"]


def load_pages(
    pages: torch.Tensor, layout: PageLayout, index: torch.Tensor, chunks: int, dtype: torch.dtype
) -> torch.Tensor:
    """Copy the pages named by ``index`` (from ``plane_index``) in the order it gives.

    fp8 values come as stored, not yet multiplied by their scale.

    Returns:
        ``[chunks, H, 2, tokens, padded_head_dim]`` in ``dtype``, memory of its own.
    """
    units = as_units(pages, layout, rows=False).index_select(0, index)
    stored = units.view(pages.dtype) if layout.element_bytes == 1 else units
    shape = (chunks, layout.num_kv_heads, layout.planes, -1, layout.padded_head_dim)
    return stored.view(shape).to(dtype)


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
    loaded = load_pages(pages, layout, plane_index(layout, page_ids[None]), 1, dtype)[0]
    starts = np.cumsum([0, *(len(p) for p in page_lists)])[:-1] * size
    spans = [np.arange(n) + start for n, start in zip(lengths, starts, strict=True)]
    tokens = torch.from_numpy(np.concatenate([np.empty(0, dtype=np.int64), *spans]))
    rows = loaded[..., : layout.head_dim].permute(1, 2, 0, 3)[:, tokens]
    key, value = rows[0].contiguous(), rows[1].contiguous()
    return (key * k_scale, value * v_scale) if fp8 else (key, value)
