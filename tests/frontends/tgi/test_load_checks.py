"""What is refused when TGI has loaded a model, before it serves."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from bicl.errors import ConfigError
from bicl.frontends.tgi.probe import try_pages
from bicl.frontends.tgi.upstream import Release
from bicl.frontends.tgi.upstream_patches import _check_model, _keep_bounds

NEW, OLD = Release(("3.3.7",), ()), Release(("3.1.0",), ("sliding windows",))


class FlashCausalLM:
    model_id = "org/model"
    num_heads, num_kv_heads, head_size = 4, 2, 64
    dtype = kv_cache_dtype = torch.float32
    device = torch.device("cpu")
    sliding_window = None
    info = SimpleNamespace(block_size=64)

    def __init__(self, **changes: Any) -> None:
        self.__dict__.update(changes)


class VlmCausalLM(FlashCausalLM):
    pass


class CausalLM:
    model_id = "org/slow"


@pytest.fixture(autouse=True)
def drafts(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """TGI's modules as far as the checks look at them; holds the number of drafts."""
    state = SimpleNamespace(count=0)
    for name, contents in {
        "models.flash_causal_lm": {"FlashCausalLM": FlashCausalLM},
        "models.globals": {"PREFIX_CACHING": True},
        "models.vlm_causal_lm": {"VlmCausalLM": VlmCausalLM},
        "utils.speculate": {"get_speculate": lambda: state.count},
    }.items():
        module = ModuleType(f"text_generation_server.{name}")
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return state


def refusal(model: Any, release: Release = NEW) -> str:
    with pytest.raises(ConfigError) as caught:
        _check_model(model, release)
    return str(caught.value)


def test_bounds_are_not_cut_down_to_a_window_where_whole_sequences_are_stored() -> None:
    for release, bound in ((NEW, None), (OLD, 4096)):
        model = FlashCausalLM(max_past=lambda: 4096)
        _keep_bounds(model, release)
        assert model.max_past() == bound


@pytest.mark.parametrize("head_size", [64, 80, 96, 100, 120, 128, 192, 256])
def test_models_with_pages_are_accepted(head_size: int) -> None:
    _check_model(FlashCausalLM(head_size=head_size), NEW)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_pages_are_accepted(dtype: torch.dtype) -> None:
    _check_model(FlashCausalLM(kv_cache_dtype=dtype), NEW)


def test_slow_models_are_refused_by_name() -> None:
    assert "org/slow is served by CausalLM" in refusal(CausalLM())


def test_speculation_with_vision_is_refused(drafts: SimpleNamespace) -> None:
    _check_model(VlmCausalLM(), NEW)
    drafts.count = 2
    assert "--speculate 2 with the vision model" in refusal(VlmCausalLM())


def test_adapters_share_no_pages_through_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """One adapter's request would write a page that another's still reads. (A11)"""
    monkeypatch.setenv("LORA_ADAPTERS", "poet")
    assert "PREFIX_CACHING with LoRA adapters" in refusal(FlashCausalLM())


def test_page_size_told_to_the_router_must_be_ours() -> None:
    told = SimpleNamespace(block_size=256)
    assert "tell the router pages of 256 tokens" in refusal(FlashCausalLM(info=told))


def test_windows_are_refused_on_old_releases() -> None:
    _check_model(FlashCausalLM(sliding_window=4096), NEW)
    message = refusal(FlashCausalLM(sliding_window=4096), OLD)
    assert "sliding window of 4096" in message
    assert "this is 3.1.0" in message


def test_shapes_without_a_kernel_are_refused_with_what_they_are() -> None:
    """(A48)"""
    with pytest.raises(ConfigError, match=r"4 query and 2 KV heads of 2000.*1\.\.1024"):
        try_pages(FlashCausalLM(head_size=2000))
    with pytest.raises(ConfigError, match=r"cache torch\.int8"):
        try_pages(FlashCausalLM(kv_cache_dtype=torch.int8))
