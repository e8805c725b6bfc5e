"""``copy_pages``: whole pages, as they lie."""

from __future__ import annotations

import torch

__all__ = ["copy_pages"]


def copy_pages(pages: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """``pages[target[i]] = pages[source[i]]`` (int64 ``[n]``); all sources are read first."""
    flat = pages.view(pages.shape[0], -1)
    if pages.element_size() == 1:
        flat = flat.view(torch.uint8)
    flat.index_copy_(0, target, flat.index_select(0, source))
