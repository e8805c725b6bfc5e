"""Rows over their root mean square."""

from __future__ import annotations

import torch

from bicl.ops.cuda import library

__all__ = ["rms_norm"]


def rms_norm(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``rows / sqrt(mean(rows ** 2) + eps) * weight``, in float32 and rounded once.

    Args:
        rows: ``[..., N]``, float16 or bfloat16; weight: ``[N]``, the same dtype.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; the message names them.
    """
    out = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    width = rows.shape[-1]
    library.module().rms_norm(out.view(-1, width), rows.reshape(-1, width), weight, eps, True)
    return out
