"""What the CUDA backend keeps from one decode call to the next. It needs no GPU: the library is a
stand-in."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch
from support.cases import Step, build_step

from bicl.attention import cuda
from bicl.attention.cuda import CudaBackend
from bicl.attention.pool import LayerCache
from bicl.cache.layout import PageLayout
from bicl.errors import InvalidInputError
from bicl.ops.cuda import library

LAYOUT = PageLayout(2, 64, torch.float16)


class Library:
    """Counts what is bound and planned, and keeps the calls."""

    def __init__(self) -> None:
        self.bound: list[tuple[object, ...]] = []
        self.plans = 0
        self.calls: list[tuple[object, ...]] = []

    def decode_workspace_bytes(self, *sizes: object) -> int:
        return 64

    def decode_plan_bytes(self, batch: int) -> int:
        return 16 * batch

    def bind_decode_attention(self, *given: object):
        self.bound.append(given)
        return self.decode

    def decode(self, *call: object) -> None:
        query = call[2]
        assert isinstance(query, torch.Tensor)
        if query.stride(-1) != 1 or query.dtype != torch.float16:
            raise ValueError("refused")
        self.calls.append(call)

    def plan_decode(self, *given: object) -> None:
        self.plans += 1


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Library:
    kernels = Library()
    monkeypatch.setattr(library, "module", lambda: kernels)
    monkeypatch.setattr(library, "require_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    card = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    return kernels


def step(batch: int = 2) -> Step:
    return build_step([(1, 3)] * batch, LAYOUT, group=2, dtype=torch.float16)


def test_calls_on_one_layer_are_bound_once(kernels: Library) -> None:
    backend, one = CudaBackend(), step()
    backend.plan(one.meta)
    for _ in range(3):
        backend.run(one.query, one.layer, one.meta, scale=0.1)
    assert len(kernels.bound) == 1
    assert kernels.plans == 1
    plans = [call[5] for call in kernels.calls]
    assert plans[0] is not None
    assert all(plan is plans[0] for plan in plans)


def test_other_options_and_layers_are_bound_apart(kernels: Library) -> None:
    backend, one, other = CudaBackend(), step(), step()
    backend.run(one.query, one.layer, one.meta, scale=0.1)
    backend.run(one.query, one.layer, one.meta, scale=0.2)
    backend.run(one.query, one.layer, one.meta, scale=0.1, window_left=64)
    backend.run(one.query, one.layer, one.meta, scale=0.1, softcap=30.0)
    backend.run(other.query, other.layer, other.meta, scale=0.1)
    assert [given[0] is one.layer.pages for given in kernels.bound] == [True] * 4 + [False]
    assert [given[6:9] for given in kernels.bound[:4]] == [
        (0.1, 0.0, -1),
        (0.2, 0.0, -1),
        (0.1, 0.0, 64),
        (0.1, 30.0, -1),
    ]


def test_a_batch_that_outgrows_the_workspace_is_bound_anew(
    kernels: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "MIN_PAIRS", 1)
    backend, small, large = CudaBackend(), step(2), step(5)
    for one in (small, large, small):
        backend.run(one.query, small.layer, one.meta, scale=0.1)
    counters = [given[5] for given in kernels.bound]
    assert len(counters) == 2
    assert counters[0].numel() < counters[1].numel()  # type: ignore[attr-defined]


def test_queries_that_the_kernel_cannot_read_are_copied(kernels: Library) -> None:
    backend, one = CudaBackend(), step()
    turned = one.query.transpose(1, 2).contiguous().transpose(1, 2)
    backend.run(turned, one.layer, one.meta, scale=0.1)
    (call,) = kernels.calls
    assert torch.equal(call[2], one.query)  # type: ignore[arg-type]
    assert call[2].is_contiguous()  # type: ignore[attr-defined]


def test_queries_that_no_copy_helps_are_refused(kernels: Library) -> None:
    backend, one = CudaBackend(), step()
    with pytest.raises(InvalidInputError, match="refused"):
        backend.run(one.query.float(), one.layer, one.meta, scale=0.1)
    with pytest.raises(InvalidInputError, match=r"\[T, num_q_heads, head_dim\], got \[2, 256\]"):
        backend.run(one.query.flatten(1), one.layer, one.meta, scale=0.1)
    assert not kernels.calls


def test_layers_that_are_gone_leave_nothing_behind(kernels: Library) -> None:
    backend, one = CudaBackend(), step()
    for _ in range(50):  # ids are used again
        layer = LayerCache(one.layer.pages.clone(), LAYOUT)
        backend.run(one.query, layer, one.meta, scale=0.1)
        assert kernels.bound[-1][0] is layer.pages
        del layer
        kernels.bound.clear()
    gc.collect()
    assert not backend._bound
