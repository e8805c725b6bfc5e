"""How far an answer may be from the truth: twice as far as PyTorch in the same precision.

FlashAttention's own rule (hopper/test_flash_attn.py): ``max |out - truth|`` is at most ``factor``
times that of plain PyTorch operators run in the tested dtype, plus twice the noise of rounding one
addition. The factor is 2, or 3 with softcap.
"""

from __future__ import annotations

import math

import torch

LSE_TOLERANCE = 1e-3


def same_precision_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    causal: bool,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
) -> torch.Tensor:
    """One sequence, ``[q, Hq, d]`` over ``[k, H, d]``, every operator in the tensors' own dtype."""
    num_q, num_k = query.shape[0], key.shape[0]
    group = query.shape[1] // key.shape[1]
    if num_q == 0 or num_k == 0:
        return torch.zeros_like(query)
    key = key.to(query.dtype).repeat_interleave(group, dim=1)
    value = value.to(query.dtype).repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, key * scale)
    if softcap > 0.0:
        scores = (scores / softcap).tanh() * softcap
    mask = visible(num_q, num_k, causal, window_left, window_right, query.device)
    weights = torch.softmax(scores.masked_fill(~mask, -math.inf), dim=-1)
    weights = weights.masked_fill(~mask.any(-1)[:, None], 0.0)
    return torch.einsum("hqk,khd->qhd", weights, value)


def visible(
    num_q: int,
    num_k: int,
    causal: bool,
    window_left: int = -1,
    window_right: int = -1,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """bool ``[q, k]``: which keys a query sees; its own is ``i + num_k - num_q``."""
    own = torch.arange(num_q, device=device)[:, None] + num_k - num_q
    distance = torch.arange(num_k, device=device) - own
    mask = torch.ones(num_q, num_k, dtype=torch.bool, device=device)
    if window_left >= 0:
        mask &= distance >= -window_left
    right = 0 if causal else window_right
    if right >= 0:
        mask &= distance <= right
    return mask


def max_error(out: torch.Tensor, truth: torch.Tensor) -> float:
    return (out.float() - truth.float()).abs().max().item() if truth.numel() else 0.0


def rounding_noise(truth: torch.Tensor, dtype: torch.dtype) -> float:
    rounded = truth.to(dtype)
    return max_error(rounded + 0.3 - 0.3, rounded)


def assert_close_enough(
    out: torch.Tensor,
    truth: torch.Tensor,
    same_precision: torch.Tensor,
    *,
    softcap: float = 0.0,
    factor: float | None = None,
) -> None:
    """``out`` errs at most ``factor`` (2; 3 with softcap) times as much as ``same_precision``."""
    assert out.shape == truth.shape
    assert torch.isfinite(out.float()).all(), "NaN or inf in the output"
    times = factor or (3.0 if softcap > 0.0 else 2.0)
    allowed = times * max_error(same_precision, truth) + 2 * rounding_noise(truth, out.dtype)
    if softcap > 0.0:
        allowed += 3e-4
    assert max_error(out, truth) <= allowed + 1e-6


def assert_lse_close(lse: torch.Tensor, truth: torch.Tensor) -> None:
    """Finite where the truth is finite, -inf where it is -inf."""
    assert lse.shape == truth.shape
    assert lse.dtype == torch.float32
    assert torch.equal(torch.isneginf(lse), torch.isneginf(truth))
    finite = torch.isfinite(truth)
    torch.testing.assert_close(lse[finite], truth[finite], atol=LSE_TOLERANCE, rtol=1e-4)
