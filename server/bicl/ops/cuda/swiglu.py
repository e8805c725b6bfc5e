"""The gated activation of a feed-forward layer."""

from __future__ import annotations

import torch

from bicl.ops.cuda import library

__all__ = ["swiglu"]


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``, in float32 and rounded once.

    Args:
        gate_up: float16 or bfloat16 ``[T, 2 I]``, a row's gates, then its ups.

    Returns:
        ``[T, I]`` in the same dtype.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; the message names them.
    """
    tokens, width = gate_up.shape
    out = torch.empty((tokens, width // 2), dtype=gate_up.dtype, device=gate_up.device)
    library.module().swiglu(out, gate_up, True)
    return out
