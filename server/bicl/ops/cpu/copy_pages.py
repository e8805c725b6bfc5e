"""``copy_pages``: whole pages, as they lie."""

from __future__ import annotations

import torch

from bicl.ops.cpu.addressing import as_units

__all__ = ["copy_pages"]


def copy_pages(pages: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """``pages[target[i]] = pages[source[i]]`` (int64 ``[n]``); all sources are read first."""
    flat = as_units(pages, pages[0].numel())
    flat.index_copy_(0, target, flat.index_select(0, source))
