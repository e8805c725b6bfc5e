"""Products of rows with a weight."""

from __future__ import annotations

import torch
from torch.nn import functional as F

__all__ = ["add_linear", "linear"]


def linear(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``rows [T, K] @ weight [N, K].T + bias``."""
    return F.linear(rows, weight, bias)


def add_linear(
    target: torch.Tensor,
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    attention_pairs: int | None = None,
) -> None:
    """``target [T, N] += linear(rows, weight, bias)``. ``attention_pairs``: for the CUDA twin."""
    if bias is None:
        target.addmm_(rows, weight.t())
    else:
        target.add_(F.linear(rows, weight, bias))
