"""Plain token-major K and V for the length of one call: read through an index, laid into pages.

A backend reads BICL pages only. Tensors that come as rows are copied into pages of their own,
with device arithmetic alone: no length is read on the host.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from bicl.attention.backend import AttentionBackend
from bicl.attention.pool import KVPool, LayerCache
from bicl.cache.layout import PageLayout

__all__ = ["lay_into_pages"]

PAGE_SIZE = 64


def lay_into_pages(
    backend: AttentionBackend,
    key: torch.Tensor,
    value: torch.Tensor,
    row_numbers: torch.Tensor,
    dtype: torch.dtype,
    chunk_tokens: int = 0,
) -> tuple[LayerCache, torch.Tensor]:
    """Copy rows into fresh pages.

    Args:
        key, value: ``[rows, H, d]`` and ``[rows, H, dv]``; the shorter head is padded with zeros,
            which changes no score and no other output element.
        row_numbers: int64 ``[B, tokens]``, row of each token; numbers outside are clamped, so that
            places which the caller does not use may name anything.
        dtype: of the pages.
        chunk_tokens: let every chunk of so many tokens begin on a page of its own; 0: one chunk.

    Returns:
        The pages and their table, int32 ``[B, chunks * pages a chunk]``.
    """
    batch, tokens = row_numbers.shape
    chunk = min(chunk_tokens, tokens) if chunk_tokens else tokens
    chunk = max(chunk, 1)
    chunk_pages = -(-chunk // PAGE_SIZE)
    width = max(1, -(-tokens // chunk)) * chunk_pages
    device = key.device
    layout = PageLayout(
        key.shape[1],
        max(key.shape[-1], value.shape[-1]),
        dtype,
        page_size=PAGE_SIZE,
        swizzle=device.type != "cpu",
    )
    pool = KVPool([layout], max(1, batch * width), device)
    table = torch.arange(batch * width, dtype=torch.int32, device=device).view(batch, width)
    if row_numbers.numel() and key.shape[0]:
        token = torch.arange(tokens, device=device)
        place = token // chunk * (chunk_pages * PAGE_SIZE) + token % chunk
        first = torch.arange(batch, device=device)[:, None] * (width * PAGE_SIZE)
        rows = row_numbers.clamp(0, key.shape[0] - 1).view(-1)
        picked = [
            F.pad(x.index_select(0, rows).to(dtype), (0, layout.head_dim - x.shape[-1]))
            for x in (key, value)
        ]
        backend.store(pool.layers[0], picked[0], picked[1], (first + place).view(-1))
    return pool.layers[0], table
