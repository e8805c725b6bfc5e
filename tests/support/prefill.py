"""Steps of many queries a sequence on the GPU, and runs of them on poisoned memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.cases import Step
from support.compare import assert_close_enough, assert_lse_close
from support.device import DEVICE, stored_step, truth_of

from bicl.attention.cuda import CudaBackend
from bicl.cache.layout import PageLayout
from bicl.ops.cuda.prefill_attention import (
    PrefillPlan,
    plan_prefill,
    prefill_attention,
    workspace_bytes,
)

of_pages = pytest.mark.parametrize("page", [64, 32], ids="pages of {}".format)


def layout_of(
    kv_heads: int, head_dim: int, stored: torch.dtype, page: int = 64, tile: int | None = None
) -> PageLayout:
    return PageLayout(kv_heads, head_dim, stored, page, page if tile is None else tile)


def packed_step(lengths: Sequence[tuple[int, int]], layout: PageLayout, **options: object) -> Step:
    """Pages filled by the CUDA store; slots that no sequence owns stay NaN."""
    return stored_step(CudaBackend(), lengths, layout, **options)


def _plan(step: Step, **options: Any) -> PrefillPlan:
    """In a poisoned workspace."""
    query, meta, layout = step.query, step.meta, step.layer.layout
    group = query.shape[1] // layout.num_kv_heads
    num_bytes = workspace_bytes(
        query.shape[0], meta.batch_size, group, layout.padded_head_dim, DEVICE
    )
    workspace = torch.full((num_bytes,), 0xFF, dtype=torch.uint8, device=DEVICE)
    return plan_prefill(
        workspace,
        step.layer,
        meta.cu_seqlens_q,
        meta.cache_seqlens,
        num_tokens=query.shape[0],
        num_q_heads=query.shape[1],
        causal=meta.causal,
        **options,
    )


def num_splits(step: Step, **options: Any) -> int:
    """How many tiles of a KV head the plan splits: the third word of csrc's PrefillHeader."""
    return int(_plan(step, **options).workspace[8:12].view(torch.int32))


def run(
    step: Step,
    *,
    scale: float,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    force_sm80: bool = False,
    repeats: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and workspace poisoned beforehand; ``repeats`` runs of one plan must agree."""
    query, meta = step.query, step.meta
    plan = _plan(
        step,
        window_left=window_left,
        window_right=window_right,
        deterministic=deterministic,
        force_sm80=force_sm80,
    )
    results = []
    for _ in range(repeats):
        out = torch.full_like(query, math.nan)
        lse = torch.full((query.shape[1], query.shape[0]), math.nan, device=DEVICE)
        prefill_attention(
            query,
            step.layer,
            meta.page_table,
            meta.cache_seqlens,
            plan,
            out=out,
            lse=lse,
            scale=scale,
            softcap=softcap,
        )
        results.append((out, lse))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0]), "the same plan gave other bits"
        assert torch.equal(lse, results[0][1])
    return results[0]


def check(step: Step, *, softcap: float = 0.0, repeats: int = 2, **options: object) -> None:
    variant = {k: options.pop(k) for k in ("deterministic", "force_sm80") if k in options}
    truth = truth_of(step, softcap=softcap, **options)  # type: ignore[arg-type]
    out, lse = run(step, softcap=softcap, repeats=repeats, **options, **variant)  # type: ignore[arg-type]
    assert_close_enough(out, truth.out, truth.same_precision, softcap=softcap)
    assert_lse_close(lse, truth.lse)
    unseen = torch.isneginf(truth.lse).T
    assert (out[unseen] == 0).all(), "rows that see no key must be exactly zero"


def check_replays(backend: CudaBackend, step: Step, *, scale: float) -> torch.Tensor:
    """Capture a step with one token a sequence and none in the last, replay it with the step's own
    lengths: each replay is right. Returns the output of the last."""
    truth = truth_of(step, scale=scale)
    out = torch.empty_like(step.query)
    meta = step.meta
    real = meta.cu_seqlens_q.clone(), meta.cache_seqlens.clone()

    def layers() -> None:
        backend.plan(meta)
        for _ in range(2):
            backend.run(step.query, step.layer, meta, scale=scale, out=out)

    tiny = torch.ones_like(meta.cache_seqlens)
    tiny[-1] = 0
    meta.cu_seqlens_q.copy_(torch.arange(len(meta.cu_seqlens_q)))
    meta.cache_seqlens.copy_(tiny)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        layers()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers()
    meta.cu_seqlens_q.copy_(real[0])
    meta.cache_seqlens.copy_(real[1])
    for _ in range(3):
        out.fill_(math.nan)
        graph.replay()
        assert_close_enough(out, truth.out, truth.same_precision)
    return out
