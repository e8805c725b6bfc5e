"""Wrong arguments of the interface: refused by name, the cache untouched."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from bicl.attention.pool import KVPool, LayerCache
from bicl.cache.layout import PageLayout
from bicl.errors import InvalidInputError, UnsupportedError
from bicl.flash_attn_interface import (
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def dense(**changes: Any) -> dict[str, Any]:
    arguments = {
        "q": torch.zeros(2, 5, 4, 64),
        "k": torch.zeros(2, 7, 2, 64),
        "v": torch.zeros(2, 7, 2, 64),
    }
    return arguments | changes


def varlen(**changes: Any) -> dict[str, Any]:
    arguments = {
        "q": torch.zeros(5, 4, 64),
        "k": torch.zeros(7, 2, 64),
        "v": torch.zeros(7, 2, 64),
        "cu_seqlens_q": int32(0, 2, 5),
        "cu_seqlens_k": int32(0, 3, 7),
        "max_seqlen_q": 3,
        "max_seqlen_k": 4,
    }
    return arguments | changes


@pytest.fixture
def layer() -> LayerCache:
    layout = PageLayout(2, 64, torch.float32, swizzle=False)
    return KVPool([layout], 4, "cpu", fill=math.nan).layers[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(2, 4, 64)}, "q must have 4 dims, got shape"),
        ({"k": torch.zeros(2, 7, 2, 32)}, r"k must have shape .*64\], got \[2, 7, 2, 32\]"),
        ({"k": torch.zeros(3, 7, 2, 64), "v": torch.zeros(3, 7, 2, 64)}, r"k must .*\[2, any"),
        ({"v": torch.zeros(2, 6, 2, 64)}, r"v must have shape \[2, 7, 2, any\]"),
        ({"k": torch.zeros(2, 7, 2, 64).half()}, "k must be float32, got torch.float16"),
        ({"q": torch.zeros(2, 5, 4, 64).double()}, "q must be float32 or float16"),
        ({"q": torch.zeros(2, 5, 3, 64)}, "q has 3 heads; a multiple of the 2 heads of k"),
        ({"qv": torch.zeros(2, 5, 4, 32)}, r"qv must have shape \[2, 5, 4, 64\]"),
        ({"num_splits": -1}, "num_splits is -1"),
        ({"num_splits": 300}, "num_splits is 300"),
        ({"attention_chunk": -1}, "attention_chunk is -1"),
        ({"window_size": (1, 2, 3)}, "window_size must be"),
        ({"softcap": -1.0}, "softcap is -1.0"),
        ({"softmax_scale": math.nan}, "scale is nan"),
        ({"k": torch.zeros(2, 7, 2, 64, device="meta")}, "k must be on cpu, got meta"),
    ],
)
def test_dense_arguments_are_checked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        flash_attn_func(**dense(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cu_seqlens_q": int32(0, 2, 6)}, r"cu_seqlens_q must rise from 0 to at most 5"),
        ({"cu_seqlens_q": int32(1, 2, 5)}, r"cu_seqlens_q must rise from 0"),
        ({"cu_seqlens_q": int32(0, 3, 2)}, r"cu_seqlens_q must rise from 0"),
        ({"cu_seqlens_q": torch.tensor([0, 2, 5])}, "cu_seqlens_q must be int32"),
        ({"cu_seqlens_k": int32(0, 7)}, r"cu_seqlens_k must have shape \[3\]"),
        ({"max_seqlen_q": 2}, "max_seqlen_q is 2, but a sequence of cu_seqlens_q has 3"),
        ({"max_seqlen_k": 3}, "max_seqlen_k is 3, but a sequence of cu_seqlens_k has 4"),
        ({"seqused_q": int32(3, 3)}, r"seqused_q must lie between 0 and .*\[2, 3\]"),
        ({"seqused_k": int32(-1, 3)}, "seqused_k must lie between 0"),
        ({"seqused_k": int32(3)}, r"seqused_k must have shape \[2\]"),
    ],
)
def test_varlen_arguments_are_checked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        flash_attn_varlen_func(**varlen(**changes))


@pytest.mark.parametrize(
    ("qkv", "heads", "message"),
    [
        (torch.zeros(2, 5, 2, 4, 64), None, r"\[\.\.\., 3, heads, head_dim\]"),
        (torch.zeros(2, 5, 8, 64), None, "num_heads_q is needed"),
        (torch.zeros(2, 5, 7, 64), 4, "7 heads"),
        (torch.zeros(2, 5, 4, 64), 4, "4 heads"),
        (torch.zeros(5, 64), 4, "qkv must have 5 dims, or 4 with num_heads_q"),
    ],
)
def test_packed_arguments_are_checked(qkv: torch.Tensor, heads: int | None, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        flash_attn_qkvpacked_func(qkv, num_heads_q=heads)


def test_packed_varlen_arguments_are_checked() -> None:
    with pytest.raises(InvalidInputError, match="qkv must have 4 dims, or 3"):
        flash_attn_varlen_qkvpacked_func(torch.zeros(5, 64), int32(0, 5), 5)


def cached(layer: LayerCache, **changes: Any) -> dict[str, Any]:
    arguments = {
        "q": torch.zeros(1, 1, 4, 64),
        "k_cache": layer,
        "v_cache": layer,
        "page_table": int32(0, 1)[None],
        "cache_seqlens": 63,
    }
    return arguments | changes


NEW = {"k": torch.zeros(1, 1, 2, 64), "v": torch.zeros(1, 1, 2, 64)}
ROTARY = {"rotary_cos": torch.ones(64, 8), "rotary_sin": torch.zeros(64, 8)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cache_seqlens": 129}, "129 tokens, but the cache holds 128"),
        ({"cache_seqlens": 128, **NEW}, "129 tokens, but the cache holds 128"),
        ({"cache_seqlens": -1}, "must not be negative"),
        ({"cache_seqlens": None}, "cache_seqlens is needed with a LayerCache"),
        ({"cache_seqlens": torch.tensor([63])}, "cache_seqlens must be int32"),
        ({"cache_seqlens": int32(1, 2)}, r"cache_seqlens must have shape \[1\]"),
        ({"page_table": None}, "a LayerCache needs page_table"),
        ({"page_table": torch.zeros(1, 2).long()}, "page_table must be int32"),
        ({"page_table": int32(0, 1, 2, 3).view(2, 2)}, "q has 1 sequences, but .* has 2"),
        ({"page_table": int32(4, 1)[None]}, r"page_table\[0, 0\] is 4"),
        (
            {"page_table": int32(0, -1)[None], "cache_seqlens": 64, **NEW},
            r"page_table\[0, 1\] is -1",
        ),
        ({"page_table": int32(0, 4)[None], "cache_seqlens": 64, **NEW}, r"page_table\[0, 1\] is 4"),
        ({"cache_batch_idx": int32(1)}, r"cache_batch_idx must lie in 0\.\.0"),
        ({"v_cache": torch.zeros(4, 64, 2, 64)}, "the same handle"),
        ({"q": torch.zeros(1, 1, 4, 32)}, "q must have shape"),
        ({"q": torch.zeros(1, 1, 3, 64)}, "q has 3 heads"),
        ({"k": NEW["k"]}, "k and v must be given together"),
        ({"k": torch.zeros(1, 1, 2, 32), "v": NEW["v"]}, "k must have shape"),
        ({"k": NEW["k"].half(), "v": NEW["v"]}, "k must be float32"),
        ({**ROTARY}, "rotary_cos needs k and v"),
        ({"rotary_seqlens": int32(1)}, "rotary_seqlens needs k and v"),
        ({**NEW, "rotary_cos": ROTARY["rotary_cos"]}, "must be given together"),
        ({**NEW, "rotary_seqlens": int32(1)}, "rotary_seqlens needs rotary_cos"),
        ({**NEW, **ROTARY, "cache_seqlens": 64}, "rotary_cos has 64 rows, but position 64"),
        (
            {**NEW, "rotary_cos": torch.ones(64, 7), "rotary_sin": torch.ones(64, 7)},
            "rotate 14 elements; a multiple of 16",
        ),
        ({"cu_seqlens_k_new": int32(0, 1)}, "cu_seqlens_k_new needs k and v"),
        ({"q": torch.zeros(1, 4, 64), "cu_seqlens_q": int32(0, 1)}, "max_seqlen_q is needed"),
    ],
)
def test_cache_arguments_are_checked_before_anything_is_written(
    layer: LayerCache, changes: dict[str, Any], message: str
) -> None:
    """(A41, A42)"""
    with pytest.raises(InvalidInputError, match=message):
        flash_attn_with_kvcache(**cached(layer, **changes))
    assert layer.pages.isnan().all()


def test_full_padded_cache_takes_no_more(layer: LayerCache) -> None:
    """(A41)"""
    full = torch.zeros(1, 64, 2, 64)
    with pytest.raises(InvalidInputError, match="65 tokens, but the cache holds 64"):
        flash_attn_with_kvcache(torch.zeros(1, 1, 4, 64), full, full, cache_seqlens=64, **NEW)


@pytest.mark.parametrize("page", [3, -1])
def test_token_major_page_outside_the_cache_is_refused(page: int) -> None:
    """(A42)"""
    cache = torch.zeros(3, 16, 2, 64)
    arguments = {"cache_seqlens": 17, "page_table": int32(0, page)[None]}
    with pytest.raises(InvalidInputError, match=rf"page_table\[0, 1\] is {page}"):
        flash_attn_with_kvcache(torch.zeros(1, 1, 4, 64), cache, cache, **arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qv": torch.zeros(1, 1, 4, 64)}, "qv is not available with a LayerCache"),
        ({"cache_leftpad": int32(1)}, "cache_leftpad is not available.*page_table"),
        ({"k_descale": torch.ones(1, 2)}, "k_descale is not available.*k_scale"),
        ({"v_descale": torch.ones(1, 2)}, "v_descale is not available.*v_scale"),
        ({"attention_chunk": 100}, "attention_chunk is 100.*multiple of its page size 64"),
        ({"scheduler_metadata": int32(1)}, "scheduler_metadata belongs to FlashAttention"),
    ],
)
def test_what_a_handle_does_not_offer_is_named(
    layer: LayerCache, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        flash_attn_with_kvcache(**cached(layer, **changes))


def test_handle_in_the_packed_function_names_the_right_one(layer: LayerCache) -> None:
    """(A45)"""
    with pytest.raises(UnsupportedError, match="call flash_attn_with_kvcache"):
        flash_attn_varlen_func(**varlen(k=layer, v=layer))
    with pytest.raises(UnsupportedError, match="call flash_attn_with_kvcache"):
        flash_attn_func(**dense(k=layer, v=layer))


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_gradients_are_refused_not_lost(name: str) -> None:
    arguments = dense()
    arguments[name].requires_grad_()
    with pytest.raises(UnsupportedError, match=f"^{name} requires a gradient"):
        flash_attn_func(**arguments)
    with torch.no_grad():
        assert flash_attn_func(**arguments).shape == (2, 5, 4, 64)


def test_unsupported_is_also_not_implemented() -> None:
    """Callers that probe a FlashAttention for features catch the built-in error."""
    with pytest.raises(NotImplementedError):
        flash_attn_with_kvcache(
            torch.zeros(1, 1, 2, 64),
            torch.zeros(1, 4, 2, 64),
            torch.zeros(1, 4, 2, 64),
            scheduler_metadata=int32(1),
        )
