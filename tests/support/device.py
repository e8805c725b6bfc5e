"""Steps on the GPU: pages filled by the CUDA store, truth in float32 by plain torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from support.cases import Step, build_step
from support.compare import same_precision_attention, visible

from bicl.attention.cuda import CudaBackend
from bicl.cache.layout import PageLayout

DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Truth:
    out: torch.Tensor  # float32 [T, num_q_heads, head_dim]
    lse: torch.Tensor  # float32 [num_q_heads, T]
    same_precision: torch.Tensor  # plain torch in the query's dtype, its scores in that dtype too


def stored_step(
    backend: CudaBackend, lengths: Sequence[tuple[int, int]], layout: PageLayout, **options: object
) -> Step:
    """``lengths`` = (queries, keys) a sequence, in pages that the backend's store has filled; every
    slot no sequence owns is NaN, table entries past it absurd."""
    step = build_step(lengths, layout, device=DEVICE, filled=False, **options)  # type: ignore[arg-type]
    backend.store(step.layer, step.key, step.value, step.slots)
    return step


def decode_step(
    backend: CudaBackend, lengths: list[int], layout: PageLayout, **options: object
) -> Step:
    """The same with one query a sequence."""
    return stored_step(backend, [(1, n) for n in lengths], layout, **options)


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


def truth_of(
    step: Step,
    *,
    scale: float,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
) -> Truth:
    """Sequence by sequence, in plain torch."""
    key, value = as_stored(step)
    out = torch.zeros(step.query.shape, device=DEVICE)
    lse = torch.full((step.query.shape[1], step.query.shape[0]), -math.inf, device=DEVICE)
    same = torch.zeros_like(step.query)
    starts = step.meta.cu_seqlens_q.tolist()
    first_key = 0
    for i, num_k in enumerate(step.meta.cache_seqlens.tolist()):
        rows, keys = slice(starts[i], starts[i + 1]), slice(first_key, first_key + num_k)
        num_q = rows.stop - rows.start
        first_key += num_k
        if not num_q or not num_k:
            continue
        options = {
            "scale": scale,
            "causal": step.meta.causal,
            "window_left": window_left,
            "window_right": window_right,
            "softcap": softcap,
        }
        rows_of_step = step.query[rows], key[keys], value[keys]
        out[rows], lse[:, rows] = attention_truth(*rows_of_step, **options)  # type: ignore[arg-type]
        same[rows] = same_precision_attention(*rows_of_step, **options)  # type: ignore[arg-type]
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
