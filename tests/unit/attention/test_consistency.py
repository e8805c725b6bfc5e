"""However a sequence was cut into steps, its answer is the same."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import build_step
from support.shards import found, outputs_by_shards

from bicl.attention import reference
from bicl.attention.cpu import CpuBackend
from bicl.attention.metadata import AttentionMetadata
from bicl.attention.pool import KVPool
from bicl.cache.layout import PageLayout

TOTAL = 200


def run_in_steps(
    cuts: list[int],
    *,
    layout: PageLayout,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int = -1,
    softcap: float = 0.0,
    store_late: bool = False,
) -> torch.Tensor:
    """Store and attend step by step; a step ends at each of ``cuts``.

    ``store_late`` poisons the pool, so that a step which read ahead would show.
    """
    backend = CpuBackend()
    pool = KVPool([layout], 8, "cpu", fill=math.nan)
    pages = torch.tensor([5, 2, 7, 0, 4, 1, 6])
    position = torch.arange(TOTAL)
    slots = pages[position // layout.page_size] * layout.page_size + position % layout.page_size
    answers = []
    for begin, end in zip([0, *cuts], [*cuts, TOTAL], strict=True):
        if begin == end:
            continue
        meta = AttentionMetadata(
            pages[None].to(torch.int32),
            torch.tensor([end], dtype=torch.int32),
            torch.tensor([0, end - begin], dtype=torch.int32),
            slots[begin:end],
            end - begin,
            end,
        )
        backend.plan(meta)
        layer = pool.layers[0]
        backend.store(layer, key[begin:end], value[begin:end], meta.slot_mapping)
        answers.append(
            backend.run(
                query[begin:end], layer, meta, scale=0.125, window_left=window, softcap=softcap
            )
        )
    return torch.cat(answers)


@settings(max_examples=25, deadline=None)
@given(
    cuts=st.lists(st.integers(0, TOTAL), max_size=6).map(sorted),
    window=st.sampled_from([-1, 0, 63, 64, 100]),
    softcap=st.sampled_from([0.0, 10.0]),
    page_size=st.sampled_from([32, 64]),
    seed=st.integers(0, 3),
)
def test_prefill_extend_and_decode_agree_wherever_steps_are_cut(
    cuts: list[int], window: int, softcap: float, page_size: int, seed: int
) -> None:
    """(A2, A21)"""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(TOTAL, 4, 64, generator=generator)
    key, value = torch.randn(2, TOTAL, 2, 64, generator=generator)
    layout = PageLayout(2, 64, torch.float32, page_size=page_size, tile=32, swizzle=False)
    truth, _ = reference.attention(
        query, key, value, scale=0.125, causal=True, window_left=window, softcap=softcap
    )
    out = run_in_steps(
        cuts, layout=layout, query=query, key=key, value=value, window=window, softcap=softcap
    )
    torch.testing.assert_close(out, truth, atol=1e-5, rtol=0)


def test_decoding_token_by_token_equals_prefill_across_page_edges() -> None:
    query = torch.randn(TOTAL, 3, 64)
    key, value = torch.randn(2, TOTAL, 1, 64)
    layout = PageLayout(1, 64, torch.float32, swizzle=False)
    rows = {"layout": layout, "query": query, "key": key, "value": value}
    prefill = run_in_steps([], **rows)
    decode = run_in_steps(list(range(1, TOTAL)), **rows)
    torch.testing.assert_close(decode, prefill, atol=1e-5, rtol=0)


@pytest.mark.parametrize("swizzle", [False, True])
def test_suffix_after_cached_prefix_equals_fresh_prefill(swizzle: bool) -> None:
    """192 tokens, 128 of them cached: same rows as prefilling all of them. (A2, A3)"""
    layout = PageLayout(2, 128, torch.float32, swizzle=swizzle)
    whole = build_step([(192, 192)], layout, group=4)
    backend = CpuBackend()
    fresh = backend.run(whole.query, whole.layer, whole.meta, scale=0.1)
    tail = AttentionMetadata(
        whole.meta.page_table,
        whole.meta.cache_seqlens,
        torch.tensor([0, 64], dtype=torch.int32),
        whole.slots[128:],
        64,
        192,
    )
    resumed = backend.run(whole.query[128:], whole.layer, tail, scale=0.1)
    torch.testing.assert_close(resumed, fresh[128:], atol=1e-6, rtol=0)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 140)), min_size=1, max_size=6),
    group=st.integers(1, 4),
    causal=st.booleans(),
    left=st.integers(-1, 80),
    right=st.integers(-1, 80),
    seed=st.integers(0, 3),
)
def test_any_mixture_of_lengths_equals_the_truth(
    lengths: list[tuple[int, int]], group: int, causal: bool, left: int, right: int, seed: int
) -> None:
    layout = PageLayout(1, 32, torch.float32, page_size=32, tile=32, swizzle=False)
    step = build_step(lengths, layout, group=group, causal=causal, seed=seed)
    options = {"scale": 0.2, "window_left": left, "window_right": right}
    out, lse = CpuBackend().run(step.query, step.layer, step.meta, return_lse=True, **options)
    truth, truth_lse = reference.run(step.query, step.layer, step.meta, **options)
    torch.testing.assert_close(out, truth, atol=1e-5, rtol=0)
    torch.testing.assert_close(lse, truth_lse, atol=1e-5, rtol=1e-5)


def test_batch_mates_change_nothing() -> None:
    layout = PageLayout(3, 64, torch.float32, swizzle=False)
    together = build_step([(1, 65), (70, 134), (1, 333)], layout, group=3)
    backend = CpuBackend()
    out = backend.run(together.query, together.layer, together.meta, scale=0.125)
    for sequence, rows in enumerate((slice(0, 1), slice(1, 71), slice(71, 72))):
        queries = rows.stop - rows.start
        alone = AttentionMetadata(
            together.meta.page_table[sequence : sequence + 1],
            together.meta.cache_seqlens[sequence : sequence + 1],
            torch.tensor([0, queries], dtype=torch.int32),
            torch.empty(0, dtype=torch.int64),
            queries,
            334,
        )
        single = backend.run(together.query[rows], together.layer, alone, scale=0.125)
        torch.testing.assert_close(out[rows], single, atol=1e-6, rtol=0)


def test_needles_in_fp8_are_found_whatever_the_number_of_shards() -> None:
    """At 10, 50 and 90 % of 32k tokens, as in bf16. (A50)"""
    backend = CpuBackend()
    for stored, shards in ((torch.bfloat16, 1), *((torch.float8_e4m3fn, n) for n in (1, 2, 4))):
        out, needles = outputs_by_shards(backend, stored, shards, "cpu")
        assert found(out, needles).all()
        if shards == 1:
            whole = out
        torch.testing.assert_close(out, whole, atol=1e-2, rtol=1e-2)
