"""Rotary position embedding."""

from __future__ import annotations

import torch

from bicl.ops.cuda import library

__all__ = ["rotate"]


def rotate(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Turns dims ``i`` and ``i + R / 2`` of each head together, in place, for ``i < R / 2``.

    Computed in float32 and rounded once. Dims from ``R`` on stay as they are.

    Args:
        query: ``[T, num_q_heads, head_dim]``; key: ``[T, num_kv_heads, head_dim]``; float16 or
            bfloat16, any strides but 1 in the last dim.
        cos, sin: ``[T, R]``, the same dtype.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; the message names them.
    """
    library.module().rotate(query, key, cos, sin, True)
