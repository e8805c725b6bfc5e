"""``flash_attn_with_kvcache``: append, rotary, pages, batch index, left padding, chunks."""

from __future__ import annotations

import math

import pytest
import torch
from support.cases import FA3_KVCACHE_LENGTHS, FA3_PAGE_SIZES
from support.kvcache import CASES, HEADS, KV_HEADS, Cache, make_call

from bicl.attention import reference
from bicl.attention.pool import KVPool, LayerCache
from bicl.cache.layout import PageLayout
from bicl.flash_attn_interface import flash_attn_varlen_func, flash_attn_with_kvcache

DIM = 32


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(str(v) for v in case.values()))
def test_every_pair_of_features(case: dict[str, object]) -> None:
    """(A4)"""
    call = make_call(case, DIM, torch.float32)
    out, lse = call.run("cpu")
    for part in call.parts:
        truth, truth_lse, _ = call.truth(part)
        torch.testing.assert_close(out[part.rows], truth, atol=2e-5, rtol=0)
        torch.testing.assert_close(lse[:, part.rows], truth_lse, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["plain", "swizzled", None, 16])
def test_append_of_two_equals_two_appends_of_one(kind: str | int | None) -> None:
    """Onto 63 tokens, so that the second lands in the next page. (A4)"""
    query = torch.randn(1, 2, HEADS, DIM)
    key, value = torch.randn(2, 1, 2, KV_HEADS, DIM)
    answers = []
    for steps in ([slice(0, 2)], [slice(0, 1), slice(1, 2)]):
        torch.manual_seed(5)
        cache = Cache(kind, [63], 128, None)
        out = [
            flash_attn_with_kvcache(
                query[:, step],
                cache.k_cache,
                cache.v_cache,
                key[:, step],
                value[:, step],
                cache_seqlens=63 + step.start,
                page_table=cache.table,
                causal=True,
            )
            for step in steps
        ]
        answers.append((torch.cat(out, dim=1), cache.everything()))
    torch.testing.assert_close(answers[0][0], answers[1][0], atol=1e-6, rtol=0)
    for once, twice in zip(answers[0][1], answers[1][1], strict=True):
        torch.testing.assert_close(once, twice, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("kind", ["plain", None, 16])
def test_append_changes_the_new_rows_only(kind: str | int | None) -> None:
    """(A24)"""
    cache = Cache(kind, [63, 10], 128, None)
    before = [tensor.clone() for tensor in cache.everything()]
    key, value = torch.randn(2, 2, 2, KV_HEADS, DIM)
    flash_attn_with_kvcache(
        torch.randn(2, 2, HEADS, DIM),
        cache.k_cache,
        cache.v_cache,
        key,
        value,
        cache_seqlens=torch.tensor([63, 10], dtype=torch.int32),
        page_table=cache.table,
    )
    after = [tensor.clone() for tensor in cache.everything()]
    expected = Cache.__new__(Cache)
    expected.__dict__ = dict(cache.__dict__)
    for tensor, old in zip(cache.everything(), before, strict=True):
        tensor.copy_(old)
    for i, length in enumerate([63, 10]):
        expected.write(i, length, key[i], value[i])
    for got, want in zip(after, cache.everything(), strict=True):
        torch.testing.assert_close(got, want, atol=0, rtol=0, equal_nan=True)


def test_token_major_cache_that_is_a_view_is_written_in_place() -> None:
    """K and V as halves of one tensor, as serving frameworks allocate them."""
    both = torch.zeros(4, 2, 16, KV_HEADS, DIM)
    k_cache, v_cache = both.unbind(1)
    table = torch.tensor([[2, 0]], dtype=torch.int32)
    key, value = torch.randn(2, 1, 3, KV_HEADS, DIM)
    flash_attn_with_kvcache(
        torch.randn(1, 3, HEADS, DIM),
        k_cache,
        v_cache,
        key,
        value,
        cache_seqlens=15,
        page_table=table,
    )
    assert torch.equal(both[2, 0, 15], key[0, 0])
    assert torch.equal(both[0, 0, :2], key[0, 1:])
    assert torch.equal(both[2, 1, 15], value[0, 0])
    assert int(both.ne(0).sum()) == 2 * key.numel()


# FlashAttention's own test leaves out lengths that are no multiple of the page size.
CACHE_SHAPES = [
    (num_q, num_k, page_size)
    for num_q, num_k in FA3_KVCACHE_LENGTHS
    for page_size in FA3_PAGE_SIZES
    if num_k <= 1024 and (page_size is None or num_k % page_size == 0)
]


@pytest.mark.parametrize(("num_q", "num_k", "page_size"), CACHE_SHAPES)
def test_flash_attentions_own_cache_shapes(num_q: int, num_k: int, page_size: int | None) -> None:
    cache = Cache(page_size, [num_k, num_k // 2 + 1], num_k, None)
    query = torch.randn(2, num_q, HEADS, DIM)
    out = flash_attn_with_kvcache(
        query,
        cache.k_cache,
        cache.v_cache,
        cache_seqlens=torch.tensor(cache.lengths, dtype=torch.int32),
        page_table=cache.table if page_size is None else cache.pages.int(),
        causal=True,
    )
    for i, length in enumerate(cache.lengths):
        truth, _ = reference.attention(
            query[i],
            cache.key[i, :length],
            cache.value[i, :length],
            scale=DIM**-0.5,
            causal=True,
        )
        torch.testing.assert_close(out[i], truth, atol=1e-5, rtol=0)


def test_paged_varlen_equals_the_packed_function() -> None:
    """The documented conversion from cu_seqlens_k to cache_seqlens: (1, 65) and (70, 134).

    (A3, A45)
    """
    layout = PageLayout(2, 128, torch.float32)
    pool = KVPool([layout], 6, "cpu", fill=math.nan)
    table = torch.tensor([[4, 1, 10**9], [0, 5, 2]], dtype=torch.int32)
    starts_q = torch.tensor([0, 1, 71], dtype=torch.int32)
    starts_k = torch.tensor([0, 65, 199], dtype=torch.int32)
    query = torch.randn(71, 8, 128)
    key, value = torch.randn(2, 199, 2, 128)
    slots = torch.cat(
        [
            table[i, torch.arange(n) // 64].long() * 64 + torch.arange(n) % 64
            for i, n in enumerate((65, 134))
        ]
    )
    reference.store(pool.layers[0], key, value, slots)
    paged = flash_attn_with_kvcache(
        query,
        pool.layers[0],
        None,
        cache_seqlens=starts_k.diff(),
        page_table=table,
        cu_seqlens_q=starts_q,
        max_seqlen_q=70,
        causal=True,
    )
    packed = flash_attn_varlen_func(query, key, value, starts_q, starts_k, 70, 134, causal=True)
    torch.testing.assert_close(paged, packed, atol=1e-6, rtol=0)
    truth, _ = reference.attention(query[1:], key[65:], value[65:], scale=128**-0.5, causal=True)
    torch.testing.assert_close(paged[1:], truth, atol=1e-5, rtol=0)


def test_windowed_decode_of_a_large_batch_equals_page_size_one() -> None:
    """Window 100 over pages of 64 and of 1. (A44)"""
    lengths = [(37 * i) % 190 + 1 for i in range(32)]
    query = torch.randn(32, 1, HEADS, DIM)
    answers = []
    for kind in ("plain", 1):
        torch.manual_seed(3)
        cache = Cache(kind, lengths, 192, None)
        answers.append(
            flash_attn_with_kvcache(
                query,
                cache.k_cache,
                cache.v_cache,
                cache_seqlens=torch.tensor(lengths, dtype=torch.int32),
                page_table=cache.table,
                causal=True,
                window_size=(100, 0),
            )
        )
    torch.testing.assert_close(answers[0], answers[1], atol=1e-6, rtol=0)


def test_poisoned_pages_give_finite_answers_for_prefill_and_five_decodes() -> None:
    """(A40)"""
    answers = []
    for fill in (math.nan, 0.0):
        torch.manual_seed(1)
        pool = KVPool([PageLayout(KV_HEADS, DIM, torch.float32, tile=32)], 3, "cpu", fill=fill)
        table = torch.tensor([[2, 0, -1]], dtype=torch.int32)
        out = []
        for begin, end in [(0, 65), *((n, n + 1) for n in range(65, 70))]:
            rows = torch.randn(1, end - begin, HEADS + 2 * KV_HEADS, DIM)
            q, k, v = rows.split([HEADS, KV_HEADS, KV_HEADS], dim=2)
            out.append(
                flash_attn_with_kvcache(
                    q,
                    pool.layers[0],
                    pool.layers[0],
                    k,
                    v,
                    cache_seqlens=begin,
                    page_table=table,
                    causal=True,
                )
            )
        answers.append(torch.cat(out, dim=1))
    assert torch.isfinite(answers[0]).all()
    assert torch.equal(*answers)


def test_fp8_handle_carries_its_scales() -> None:
    layout = PageLayout(KV_HEADS, DIM, torch.float8_e4m3fn, tile=32)
    pages = torch.zeros(layout.shape(2), dtype=layout.dtype)
    layer = LayerCache(pages, layout, k_scale=0.05, v_scale=0.02)
    rows = torch.randn(1, 70, HEADS + 2 * KV_HEADS, DIM).bfloat16()
    q, k, v = rows.split([HEADS, KV_HEADS, KV_HEADS], dim=2)
    table = torch.tensor([[1, 0]], dtype=torch.int32)
    out = flash_attn_with_kvcache(
        q, layer, None, k, v, cache_seqlens=0, page_table=table, causal=True
    )
    key, value = reference.gather(layer, table, torch.tensor([70]))
    truth, _ = reference.attention(q[0], key, value, scale=DIM**-0.5, causal=True)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out[0].float(), truth, atol=2e-2, rtol=0)


def test_whole_cache_is_used_without_lengths() -> None:
    key, value = torch.randn(2, 2, 70, KV_HEADS, DIM)
    query = torch.randn(2, 1, HEADS, DIM)
    assert torch.equal(
        flash_attn_with_kvcache(query, key, value),
        flash_attn_with_kvcache(query, key, value, cache_seqlens=70),
    )
