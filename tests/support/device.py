"""Steps on the GPU: pages filled by the CUDA store, truth in float32 by plain torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from support.cases import Step, build_step
from support.compare import same_precision_attention, visible

from bicl.attention.cuda import CudaBackend
from bicl.cache.layout import PageLayout

DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Truth:
    out: torch.Tensor  # float32 [B, num_q_heads, head_dim]
    lse: torch.Tensor  # float32 [num_q_heads, B]
    same_precision: torch.Tensor  # plain torch in the query's dtype, its scores in that dtype too


def decode_step(
    backend: CudaBackend, lengths: list[int], layout: PageLayout, **options: object
) -> Step:
    """One query a sequence; every slot no sequence owns is NaN, table entries past it absurd."""
    pairs = [(1, n) for n in lengths]
    step = build_step(pairs, layout, device=DEVICE, filled=False, **options)  # type: ignore[arg-type]
    backend.store(step.layer, step.key, step.value, step.slots)
    return step


def as_stored(step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V after the rounding that storing them costs, float32."""
    rows = []
    for x, scale in ((step.key, step.layer.k_scale), (step.value, step.layer.v_scale)):
        dtype = step.layer.layout.dtype
        if dtype.itemsize == 1:
            limit = torch.finfo(dtype).max
            rows.append((x.float() / scale).clamp(-limit, limit).to(dtype).float() * scale)
        else:
            rows.append(x.float())
    return rows[0], rows[1]


def decode_truth(step: Step, *, scale: float, window_left: int = -1, softcap: float = 0.0) -> Truth:
    """Attention of a decode step, sequence by sequence."""
    key, value = as_stored(step)
    batch, heads, _ = step.query.shape
    group = heads // key.shape[1]
    out = torch.zeros(step.query.shape, device=DEVICE)
    lse = torch.full((heads, batch), -math.inf, device=DEVICE)
    same = torch.zeros_like(step.query)
    first = 0
    for i, length in enumerate(step.meta.cache_seqlens.tolist()):
        low = first if window_left < 0 else max(first, first + length - 1 - window_left)
        span = slice(low, first + length)
        first += length
        if not length:
            continue
        k = key[span].repeat_interleave(group, 1)
        v = value[span].repeat_interleave(group, 1)
        scores = torch.einsum("hd,khd->hk", step.query[i].float(), k) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        lse[:, i] = torch.logsumexp(scores, -1)
        out[i] = torch.einsum("hk,khd->hd", torch.softmax(scores, -1), v)
        same[i] = same_precision_attention(
            step.query[i : i + 1], key[span], value[span], scale=scale, causal=True, softcap=softcap
        )[0]
    return Truth(out, lse, same)


def attention_truth(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    causal: bool,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence, ``[q, Hq, d]`` over ``[k, H, d]``, in float32 on its card: output and LSE
    ``[Hq, q]``."""
    group = query.shape[1] // key.shape[1]
    keys, values = (x.float().repeat_interleave(group, 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    seen = visible(len(query), len(key), causal, window_left, window_right, query.device)
    scores = scores.masked_fill(~seen, -math.inf)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", weights, values), torch.logsumexp(scores, -1)


def with_lengths(step: Step, lengths: torch.Tensor) -> Step:
    """The same pages read only so far."""
    return replace(step, meta=replace(step.meta, cache_seqlens=lengths))
