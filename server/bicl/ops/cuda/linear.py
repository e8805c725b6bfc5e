"""Products of rows with a weight: of a decode step's few rows by a kernel that reads the weight at
the memory's rate, of more by cuBLAS."""

from __future__ import annotations

import functools

import torch

from bicl.ops.cpu import linear as torchs
from bicl.ops.cuda import library
from bicl.ops.cuda.decode_attention import leaves_sms_idle

__all__ = ["MAX_ROWS", "add_linear", "linear"]

MAX_ROWS = 8
"""One tile of the kernel. It takes two, but cuBLAS makes wide products of 12 rows faster, and a
whole layer's of 16."""


def linear(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``rows [T, K] @ weight [N, K].T + bias``, float16 or bfloat16, summed in float32."""
    if not _fits(rows, weight):
        return torchs.linear(rows, weight, bias)
    out = torch.empty((rows.shape[0], weight.shape[0]), dtype=rows.dtype, device=rows.device)
    library.module().few_rows_linear(out, rows, weight, bias, False, True)
    return out


def add_linear(
    target: torch.Tensor,
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    attention_pairs: int | None = None,
) -> None:
    """``target [T, N] += linear(rows, weight, bias)``.

    Args:
        attention_pairs: the kernel ahead is decode attention with so many (sequence, KV head)
            pairs. Where that leaves half of the SMs idle, the product waits for its end: let in
            early it made decode steps of one row longer on an H200, with more pairs shorter
            (``bench.serving --parts side``).
    """
    if _fits(rows, weight):
        early = attention_pairs is None or not leaves_sms_idle(attention_pairs, _sms(rows.device))
        library.module().few_rows_linear(target, rows, weight, bias, True, early)
    else:
        torchs.add_linear(target, rows, weight, bias)


def _fits(rows: torch.Tensor, weight: torch.Tensor) -> bool:
    outputs, depth = weight.shape
    return rows.shape[0] <= MAX_ROWS and outputs % 16 == 0 and depth % 64 == 0


@functools.cache
def _sms(device: torch.device) -> int:
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
