"""fp8 pages as 16-bit pages, each value as it is stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bicl.ops.cuda import library

if TYPE_CHECKING:
    from bicl.attention.pool import LayerCache

__all__ = ["widen_pages"]


def widen_pages(
    source: LayerCache,
    target: LayerCache,
    page_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    *,
    first_head: int,
    pages_per_sequence: int,
    pdl: bool = False,
) -> None:
    """Writes page ``j`` of sequence ``b``, values as stored, to page
    ``b * pages_per_sequence + j`` of ``target``; pages from ``pages_per_sequence`` on are left out.

    Args:
        source: fp8 pages; target: fp16 or bf16 pages of the same page size, tiles and head_dim.
            It has the KV heads from ``first_head`` on, as many as its layout says.
        page_table: int32 ``[B, max_pages]``; cache_seqlens: int32 ``[B]``; of ``source``.
        pdl: start before the kernel ahead has ended; it is waited for before anything is read.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; the message names them.
    """
    library.module().widen_pages(
        target.pages,
        source.pages,
        page_table,
        cache_seqlens,
        source.layout.page_size,
        first_head,
        pages_per_sequence,
        pdl,
    )
