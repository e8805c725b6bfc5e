"""Copies of whole pages."""

from __future__ import annotations

import torch

from bicl.ops.cuda import library

__all__ = ["copy_pages"]


def copy_pages(
    layers: torch.Tensor, page_bytes: torch.Tensor, source: torch.Tensor, target: torch.Tensor
) -> None:
    """Copies page ``source[i]`` to ``target[i]`` in every layer, in one launch.

    Args:
        layers: int64 ``[num_layers]``, device address of each layer's pages.
        page_bytes: int64 ``[num_layers]``, bytes of one page of each layer.
        source, target: int64 ``[n]``, page ids; no page may be in both. All on the device.
    """
    library.module().copy_pages(layers, page_bytes, source, target)
