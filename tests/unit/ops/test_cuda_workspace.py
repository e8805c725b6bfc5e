"""What a workspace keeps from call to call: one bound function a layer. It needs no GPU."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch

from bicl.attention.pool import KVPool, LayerCache
from bicl.cache.layout import PageLayout
from bicl.ops.cuda import library
from bicl.ops.cuda.workspace import Workspace

LAYOUT = PageLayout(2, 64, torch.float16)


@pytest.fixture
def workspace(monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """On the CPU; binding returns what it was given."""
    module = SimpleNamespace(
        decode_workspace_bytes=lambda *sizes: 64,
        bind_decode_attention=lambda *given: SimpleNamespace(given=given),
    )
    monkeypatch.setattr(library, "module", lambda: module)
    card = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    return Workspace("cpu", 64, 4, 16)


def layer(**scales: float) -> LayerCache:
    return LayerCache(KVPool([LAYOUT], 2, "cpu").layers[0].pages, LAYOUT, **scales)


def test_a_layer_is_bound_once(workspace: Workspace) -> None:
    first, second = layer(k_scale=0.5, v_scale=2.0), layer()
    bound = workspace.decode_attention_on(first, 0.1)
    assert workspace.decode_attention_on(first, 0.1) is bound
    assert workspace.decode_attention_on(second, 0.1) is not bound
    assert workspace.decode_attention_on(first, 0.1, 0.0, 100) is not bound
    pages, *rest = bound.given
    assert pages is first.pages
    assert rest[:5] == [LAYOUT.page_size, 0.5, 2.0, workspace.partials, workspace.counters]
    assert rest[5:] == [0.1, 0.0, -1, False, False, 0, 0]


def test_a_layer_that_is_gone_leaves_nothing_behind(workspace: Workspace) -> None:
    for _ in range(50):  # ids are used again
        short_lived = layer()
        bound = workspace.decode_attention_on(short_lived, 0.1)
        assert bound.given[0] is short_lived.pages
        del bound
        del short_lived
    gc.collect()
    assert not workspace._bound
