"""What the token-major contestants share: reading back the K and V that they read."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench.kernels.arena import PagedBatch

__all__ = ["key_value"]


def key_value(
    batch: PagedBatch,
    cache: tuple[torch.Tensor, torch.Tensor],
    page_ids: torch.Tensor,
    page_size: int,
) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    """K and V of a sequence out of NHD pages ``[pages, page_size, heads, head_dim]``."""
    starts = batch.page_indptr(page_size).tolist()

    def read(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = page_ids[starts[index] : starts[index + 1]].long()
        key, value = (pages[ids].flatten(0, 1)[: batch.lengths[index]] for pages in cache)
        return key, value

    return read
