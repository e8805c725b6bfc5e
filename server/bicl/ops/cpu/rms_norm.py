"""Rows over their root mean square."""

from __future__ import annotations

import torch
from torch.nn import functional as F

__all__ = ["rms_norm"]


def rms_norm(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``rows / sqrt(mean(rows ** 2) + eps) * weight``, in float32 and rounded once.

    Args:
        rows: ``[..., N]``; weight: ``[N]``.
    """
    return F.rms_norm(rows, weight.shape, weight, eps)
