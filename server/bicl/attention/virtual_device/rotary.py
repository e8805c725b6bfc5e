"""Rotary position embedding as FlashAttention applies it to appended keys and their queries."""

from __future__ import annotations

import torch

__all__ = ["apply_rotary"]


def apply_rotary(
    rows: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool,
) -> torch.Tensor:
    """Rotate the first ``rotary_dim`` elements of every row; float32 inside.

    Args:
        rows: ``[T, H, head_dim]``.
        positions: int64 ``[T]``, rows of ``cos`` and ``sin``.
        cos, sin: ``[max_position, rotary_dim / 2]``.
        interleaved: rotate elements (0, 1), (2, 3), ...; else (0, rotary_dim / 2), ...

    Returns:
        A new tensor of the shape and dtype of ``rows``.
    """
    half = cos.shape[1]
    cosine = cos.index_select(0, positions).float()[:, None, :]
    sine = sin.index_select(0, positions).float()[:, None, :]
    turned = rows[..., : 2 * half].float()
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned[..., :half], turned[..., half:]
    pair = (first * cosine - second * sine, first * sine + second * cosine)
    joined = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((joined.to(rows.dtype), rows[..., 2 * half :]), dim=-1)
