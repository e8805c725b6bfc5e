"""The CUDA backend as callers see it: mixed steps, layers that share it, refusals."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from support.cases import BATCHES, build_step
from support.compare import assert_close_enough, assert_lse_close
from support.device import DEVICE, decode_step, truth_of
from support.shards import found, outputs_by_shards

from bicl.attention.backend import make_backend
from bicl.attention.cpu import CpuBackend
from bicl.attention.cuda import CudaBackend
from bicl.cache.layout import PageLayout
from bicl.errors import BackendError, InvalidInputError, UnsupportedError

pytestmark = pytest.mark.gpu


def test_the_cuda_backend_is_made_by_device_name() -> None:
    assert make_backend("cuda").name == "cuda"
    assert make_backend("cuda:0").name == "cuda"


@pytest.mark.parametrize("batch", list(BATCHES))
def test_every_kind_of_step_agrees_with_the_cpu_backend(backend: CudaBackend, batch: str) -> None:
    layout = PageLayout(2, 64, torch.float16)
    on_cpu = build_step(BATCHES[batch], layout, group=4, dtype=torch.float16)
    step = build_step(BATCHES[batch], layout, group=4, dtype=torch.float16, device=DEVICE)
    theirs = CpuBackend()
    options = {"scale": 0.125, "return_lse": True}
    truth, truth_lse = theirs.run(on_cpu.query, on_cpu.layer, on_cpu.meta, **options)
    backend.plan(step.meta)
    out, lse = backend.run(step.query, step.layer, step.meta, **options)
    torch.testing.assert_close(out.cpu(), truth, atol=4e-3, rtol=1e-2)
    assert_lse_close(lse.cpu(), truth_lse)


@pytest.mark.parametrize("head_dim", [100, 36, 75])
@pytest.mark.parametrize("batch", list(BATCHES))
def test_heads_that_are_no_multiple_of_eight_are_served(
    backend: CudaBackend, batch: str, head_dim: int
) -> None:
    """Their pages are poisoned where nothing was stored, and zero in what pads a head. (A48)"""
    layout = PageLayout(2, head_dim, torch.float16)
    on_cpu = build_step(BATCHES[batch], layout, group=4, dtype=torch.float16)
    step = build_step(BATCHES[batch], layout, group=4, dtype=torch.float16, device=DEVICE)
    options = {"scale": 0.125, "return_lse": True}
    truth, truth_lse = CpuBackend().run(on_cpu.query, on_cpu.layer, on_cpu.meta, **options)
    backend.plan(step.meta)
    out, lse = backend.run(step.query, step.layer, step.meta, **options)
    assert out.is_contiguous()
    torch.testing.assert_close(out.cpu(), truth, atol=4e-3, rtol=1e-2)
    assert_lse_close(lse.cpu(), truth_lse)
    given = torch.full_like(out, math.nan)
    backend.run(step.query, step.layer, step.meta, scale=0.125, out=given)
    assert torch.equal(given, out)


def test_heads_that_no_decode_kernel_takes_are_refused_by_name(backend: CudaBackend) -> None:
    """The warm-up of a server runs into it before the first request does."""
    layout = PageLayout(2, 224, torch.bfloat16, page_size=32, tile=32)
    step = decode_step(backend, [40], layout, group=2, dtype=torch.bfloat16)
    with pytest.raises(BackendError, match=r"head_dim 224, tile 32.* 192.*--block-size 64"):
        backend.run(step.query, step.layer, step.meta, scale=0.1)


def test_layers_of_different_shapes_share_one_backend() -> None:
    backend = CudaBackend()
    for head_dim, tile, group in ((64, 64, 1), (256, 64, 4), (96, 32, 12), (128, 64, 40)):
        layout = PageLayout(2, head_dim, torch.bfloat16, tile=tile)
        step = decode_step(backend, [300, 5], layout, group=group, dtype=torch.bfloat16)
        truth = truth_of(step, scale=0.1)
        out = backend.run(step.query, step.layer, step.meta, scale=0.1)
        assert_close_enough(out, truth.out, truth.same_precision)


def test_a_graph_outlives_a_workspace_that_had_to_grow() -> None:
    backend = CudaBackend()
    small = decode_step(
        backend, [700, 9], PageLayout(2, 64, torch.float16), group=2, dtype=torch.float16
    )
    expected = backend.run(small.query, small.layer, small.meta, scale=0.1)
    out = torch.empty_like(expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.run(small.query, small.layer, small.meta, scale=0.1, out=out)
    large = decode_step(
        backend, [700, 9], PageLayout(2, 256, torch.float16), group=16, dtype=torch.float16
    )
    backend.run(large.query, large.layer, large.meta, scale=0.1)
    out.fill_(math.nan)
    graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_workspace_does_not_grow_while_a_graph_is_captured() -> None:
    backend = CudaBackend()
    step = decode_step(
        backend, [70], PageLayout(2, 64, torch.float16), group=2, dtype=torch.float16
    )
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(BackendError, match="run one step of the largest batch before capturing"),
        torch.cuda.graph(graph),
    ):
        backend.run(step.query, step.layer, step.meta, scale=0.1)


def test_query_strides_that_kernels_cannot_read_are_copied(backend: CudaBackend) -> None:
    step = decode_step(
        backend, [70, 3], PageLayout(2, 64, torch.float16), group=2, dtype=torch.float16
    )
    expected = backend.run(step.query, step.layer, step.meta, scale=0.1)
    odd = torch.empty(2, 4, 67, dtype=torch.float16, device=DEVICE)[..., 1:65]
    odd.copy_(step.query)
    assert torch.equal(backend.run(odd, step.layer, step.meta, scale=0.1), expected)
    turned = step.query.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(backend.run(turned, step.layer, step.meta, scale=0.1), expected)


def test_nonsense_is_refused_by_name(backend: CudaBackend) -> None:
    step = decode_step(
        backend, [70, 3], PageLayout(2, 64, torch.float16), group=2, dtype=torch.float16
    )

    def run(query: torch.Tensor = step.query, **changes: object) -> None:
        backend.run(query, step.layer, replace(step.meta, **changes), scale=0.1)  # type: ignore[arg-type]

    with pytest.raises(InvalidInputError, match="query must have the pages' dtype"):
        run(step.query.bfloat16())
    with pytest.raises(InvalidInputError, match="float16 or bfloat16"):
        run(step.query.float())
    with pytest.raises(InvalidInputError, match="do not divide among 2 KV heads"):
        run(step.query[:, :3])
    with pytest.raises(InvalidInputError, match="exceeds the pages' 64"):
        run(torch.zeros(2, 4, 72, dtype=torch.float16, device=DEVICE))
    with pytest.raises(InvalidInputError, match="cache_seqlens must be int32"):
        run(cache_seqlens=step.meta.cache_seqlens.long())
    with pytest.raises(InvalidInputError, match="page_table is on device"):
        run(page_table=step.meta.page_table.cpu())
    with pytest.raises(UnsupportedError, match="no backward pass"):
        run(step.query.clone().requires_grad_())


def test_scale_and_softcap_must_make_sense(backend: CudaBackend) -> None:
    step = decode_step(
        backend, [70], PageLayout(2, 64, torch.float16), group=2, dtype=torch.float16
    )
    for bad in ({"scale": 0.0}, {"scale": math.inf}, {"scale": 0.1, "softcap": -1.0}):
        with pytest.raises(InvalidInputError, match=r"scale|softcap"):
            backend.run(step.query, step.layer, step.meta, **bad)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_ranks_compute_what_one_card_does(
    deterministic_backend: CudaBackend, stored: torch.dtype
) -> None:
    """Bit for bit; needles at 10, 50 and 90 % of 32k tokens are found. (A50)"""
    whole, needles = outputs_by_shards(deterministic_backend, stored, 1, DEVICE)
    assert found(whole, needles).all()
    for shards in (2, 4):
        assert torch.equal(
            outputs_by_shards(deterministic_backend, stored, shards, DEVICE)[0], whole
        )
