"""Rotary position embedding."""

from __future__ import annotations

import torch

__all__ = ["rotate"]


def rotate(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Turns dims ``i`` and ``i + R / 2`` of each head together, in place, for ``i < R / 2``.

    Computed in float32 and rounded once. Dims from ``R`` on stay as they are.

    Args:
        query: ``[T, num_q_heads, head_dim]``; key: ``[T, num_kv_heads, head_dim]``.
        cos, sin: ``[T, R]``.
    """
    size = cos.shape[-1]
    cos, sin = cos[:, None].float(), sin[:, None].float()
    for rows in (query, key):
        turned = rows[..., :size].float()
        first, second = turned.chunk(2, dim=-1)
        other = torch.cat((-second, first), dim=-1)
        rows[..., :size] = (turned * cos + other * sin).to(rows.dtype)
