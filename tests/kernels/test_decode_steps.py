"""Decode steps through the backend: captured graphs, and plans that layers share."""

from __future__ import annotations

import math

import pytest
import torch
from support.cases import DECODE_LENGTHS, FP8_DTYPES
from support.compare import assert_close_enough
from support.device import decode_step, truth_of

from bicl.attention.cuda import CudaBackend
from bicl.attention.pool import LayerCache
from bicl.cache.layout import PageLayout

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("pdl", [False, True])  # early launch follows a store of slot_mapping
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("batch", [1, 5, 64])
def test_one_captured_graph_serves_all_lengths(
    batch: int, deterministic: bool, pdl: bool, planned: bool
) -> None:
    """Captured with every length 1, replayed with others; the newest token is stored inside."""
    layout = PageLayout(8, 128, torch.bfloat16)
    backend = CudaBackend(deterministic=deterministic, pdl=pdl)
    lengths = [1 + (i * 677 + 4000) % 4100 for i in range(batch)]
    step = decode_step(CudaBackend(), lengths, layout, group=4, dtype=torch.bfloat16)
    truth = truth_of(step, scale=0.1)
    last = torch.cumsum(step.meta.cache_seqlens, 0) - 1
    key, value, slots = step.key[last], step.value[last], step.meta.slot_mapping
    backend.store(step.layer, torch.full_like(key, math.nan), value, slots)  # must be overwritten
    real = step.meta.cache_seqlens.clone()
    out = torch.empty_like(step.query)

    def layer_step() -> None:
        if planned:
            backend.plan(step.meta)
        for _ in range(2):  # the first layer makes the plan, the second finds it
            backend.store(step.layer, key, value, slots)
            backend.run(step.query, step.layer, step.meta, scale=0.1, out=out)

    step.meta.cache_seqlens.fill_(1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        layer_step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer_step()
    backend.store(step.layer, torch.full_like(key, math.nan), value, slots)
    step.meta.cache_seqlens.copy_(real)
    for _ in range(3):
        out.fill_(math.nan)
        graph.replay()
        assert_close_enough(out, truth.out, truth.same_precision)
    step.meta.cache_seqlens[::2] = 0  # padding rows (A53)
    graph.replay()
    assert (out[::2] == 0).all()
    if not deterministic:
        return
    eager = backend.run(step.query, step.layer, step.meta, scale=0.1)
    assert torch.equal(out, eager)


@pytest.mark.parametrize("lengths", list(DECODE_LENGTHS))
def test_layers_of_other_shapes_have_plans_of_their_own(lengths: str) -> None:
    """One backend, one step: heads, dtypes and windows by turns; then a step of other lengths."""
    planned, alone = CudaBackend(), CudaBackend()
    for taken in (DECODE_LENGTHS[lengths], [length // 2 for length in DECODE_LENGTHS[lengths]]):
        step = decode_step(
            alone, taken, PageLayout(8, 128, torch.bfloat16), group=4, dtype=torch.bfloat16
        )
        layers = [(step.layer, step.query), (step.layer, step.query[:, :8].contiguous())]
        for layout in (PageLayout(2, 128, torch.bfloat16), PageLayout(8, 128, FP8_DTYPES[0])):
            pages = torch.empty(layout.shape(step.layer.num_pages), device="cuda").normal_()
            layers.append((LayerCache(pages.to(layout.dtype), layout), step.query))
        planned.plan(step.meta)
        for _ in range(2):
            for layer, query in layers:
                for window in (-1, 100):
                    options = {"scale": 0.1, "window_left": window}
                    out = planned.run(query, layer, step.meta, **options)
                    assert torch.equal(out, alone.run(query, layer, step.meta, **options))
