"""The gated activation of a feed-forward layer."""

from __future__ import annotations

import torch
from torch.nn import functional as F

__all__ = ["swiglu"]


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``, in float32 and rounded once.

    Args:
        gate_up: ``[T, 2 I]``, a row's gates, then its ups.

    Returns:
        ``[T, I]`` in the same dtype.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)
