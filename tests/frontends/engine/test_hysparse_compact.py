"""Compact mode through the whole engine: sparse layers give pages up when a prompt is computed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.driving import (
    SIZES,
    answers,
    collect,
    request,
    run_steps,
    running,
    stepped,
    token_facts,
)
from support.driving import random_prompt as prompt

from bicl.frontends.http.engine import Engine, EngineConfig
from bicl.frontends.http.engine.compact import REVIEW_TOKENS
from bicl.frontends.http.engine.sizing import num_pages, page_layouts
from bicl.frontends.http.request import SparseOptions
from bicl.sparse.config import HySparseConfig
from bicl.sparse.guard import GuardBounds

CONFIG = HySparseConfig(
    text_kind="off", layers="1-2/3", floor_tokens=128, sparsity_ratio=0.6, mode="compact", recent=1
)
BOUNDS = GuardBounds(min_mass_kept=0.0)
COMPACT = {"hysparse": CONFIG, "guard": BOUNDS}


@pytest.fixture(scope="module")
def compact(tiny) -> Engine:
    with running(tiny, **SIZES, **COMPACT) as engine:
        yield engine


@pytest.fixture
def cold(dense, compact) -> None:
    """Nothing is cached: chunks are cut alike."""
    dense.flush_cache()
    compact.flush_cache()


@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize("length", [1, 31, 32, 64, 104])
def test_up_to_the_floor_all_is_dense_to_the_bit(dense, compact, length: int) -> None:
    """(A57)"""
    (expected,), (result,) = answers(dense, prompt(length)), answers(compact, prompt(length))
    assert token_facts(result) == token_facts(expected)


@pytest.mark.usefixtures("cold")
def test_the_prompts_first_answer_token_is_dense_to_the_bit(dense, compact) -> None:
    (expected,), (result,) = answers(dense, prompt(600)), answers(compact, prompt(600))
    assert token_facts(result)[0] == token_facts(expected)[0]


@pytest.mark.usefixtures("cold")
def test_a_request_that_asks_for_none_is_dense_to_the_bit(dense, compact) -> None:
    (expected,) = answers(dense, prompt(601))
    (result,) = answers(compact, prompt(601), sparse=SparseOptions(sparsity_ratio=0.0))
    assert token_facts(result) == token_facts(expected)


def test_a_long_request_gives_pages_up_and_says_so(compact) -> None:
    before = compact.snapshot().sparse
    (result,) = answers(compact, prompt(600))
    told, after = result.done.usage.sparse, compact.snapshot().sparse
    assert told.actual_ratio == pytest.approx(0.6, abs=0.08)
    assert told.shadow_steps == 1
    assert told.entropy_by_group == {"sparse": told.entropy}
    # A random model looks at no passage more than at another.
    assert told.mass_kept == pytest.approx(1 - told.actual_ratio, abs=0.02)
    assert after.compactions == before.compactions + 1
    assert after.dropped_pages - before.dropped_pages == 6  # of 10


def test_at_most_thirty_per_cent_of_the_sparse_layers_pages_are_kept(long_tiny) -> None:
    """At a ratio of 0.71; in bytes, as the pools hold them."""
    config = replace(CONFIG, sparsity_ratio=0.71)
    engine = stepped(
        long_tiny,
        max_total_tokens=8192,
        max_batch_size=1,
        max_batch_prefill_tokens=2000,
        prefix_caching=False,
        hysparse=config,
        guard=BOUNDS,
    )
    stream = engine.submit(request(prompt(8130), 4))
    while engine.snapshot().generated_tokens < 2:
        assert engine.step()
    full, sparse = engine.snapshot().pages_in_use, engine.snapshot().sparse
    assert full == 128
    kept = sparse.compact_pages["in_use"]
    assert kept / full <= 0.30
    layers = engine._runner.pool.layers
    held = [layers[0].layout.page_bytes * full, 2 * layers[1].layout.page_bytes * kept]
    whole = [layer.layout.page_bytes * full for layer in layers]
    assert sum(held) / sum(whole) == pytest.approx((1 + 2 * kept / full) / 3)
    run_steps(engine)
    assert collect(stream).done.usage.sparse.actual_ratio == pytest.approx(0.71, abs=0.01)
    assert engine.snapshot().sparse.compact_pages["in_use"] == 0
    engine.check_integrity()


def test_attention_over_what_was_kept_is_that_over_those_keys(long_tiny) -> None:
    """Every kept key keeps its position, and every head its own choice. (A56)"""
    config = replace(CONFIG, layers="0-2/3")
    engine = stepped(
        long_tiny,
        max_total_tokens=1000,
        max_batch_size=1,
        max_batch_prefill_tokens=1000,
        hysparse=config,
        guard=BOUNDS,
    )
    backend, seen = engine._runner.compact, {}
    drop = backend.drop

    def spy(pages, verdicts, target):
        layer = backend.layers[1]
        length = torch.tensor([700], dtype=torch.int32)
        table = torch.tensor([pages], dtype=torch.int32)
        seen["before"] = backend.gather(layer, table, length)
        seen["verdict"], seen["target"] = verdicts[1], target
        drop(pages, verdicts, target)

    backend.drop = spy
    engine.submit(request(prompt(700), 2))
    engine.step()
    positions = seen["verdict"].positions.long()
    assert positions[:, 0].tolist() == [0, 0]
    for head in positions:
        assert head.tolist() == sorted(set(head.tolist()))
        assert head[:64].tolist() == list(range(64))  # the first window
        assert head[-32:].tolist() == list(range(668, 700))
    assert not torch.equal(positions[0], positions[1])
    length = torch.tensor([positions.shape[1]], dtype=torch.int32)
    table = torch.tensor([seen["target"]], dtype=torch.int32)
    after = backend.gather(backend.layers[1], table, length)
    for old, new in zip(seen["before"], after, strict=True):
        for head in range(2):
            assert torch.equal(new[:, head], old[positions[head], head])
    run_steps(engine)


def test_prefixes_are_shared_although_tokens_were_dropped(compact, dense) -> None:
    compact.flush_cache()
    cold, warm = (answers(compact, prompt(640, 9))[0] for _ in range(2))
    assert cold.done.usage.cached_tokens == 0
    assert warm.done.usage.cached_tokens >= 512
    assert warm.ids == cold.ids
    none = SparseOptions(sparsity_ratio=0.0)
    (whole,) = answers(compact, prompt(640, 9), sparse=none)
    assert whole.done.usage.cached_tokens >= 512
    assert whole.ids == answers(dense, prompt(640, 9))[0].ids


def test_a_prompt_whose_last_chunk_is_short_is_judged_all_the_same(tiny) -> None:
    with running(tiny, **{**SIZES, "max_batch_prefill_tokens": 199}, **COMPACT) as engine:
        (result,) = answers(engine, prompt(600))  # the last chunk has 3 tokens
        assert engine.snapshot().sparse.compactions == 1
    assert result.done.usage.sparse.actual_ratio > 0.5


def test_what_is_generated_is_judged_every_so_many_tokens(tiny) -> None:
    with running(tiny, **SIZES, **COMPACT) as engine:
        (result,) = answers(engine, prompt(300), tokens=600)
        stats = engine.snapshot().sparse
    assert len(result.ids) == 600
    assert stats.compactions == 1 + 600 // REVIEW_TOKENS
    assert result.done.usage.sparse.shadow_steps == stats.compactions
    assert result.done.usage.sparse.actual_ratio > 0.35


def test_many_requests_on_few_pages_finish(tiny) -> None:
    """Preemption, whole and compact requests side by side."""
    with running(tiny, **{**SIZES, "num_pages": 20}, **COMPACT) as engine:
        results = answers(engine, *[prompt(300 + 60 * n, n) for n in range(6)], tokens=150)
        assert engine.snapshot().preemptions > 0
        assert engine.snapshot().sparse.compact_pages["in_use"] == 0
    assert all(len(result.ids) == 150 for result in results)


@pytest.mark.parametrize("ratio", [0.3, 0.6])
def test_prompts_that_end_in_one_step_all_find_room_for_what_they_keep(tiny, ratio) -> None:
    config = replace(CONFIG, sparsity_ratio=ratio)
    sizes = {**SIZES, "max_batch_size": 2, "max_batch_prefill_tokens": 2000}
    with running(tiny, **sizes, hysparse=config, guard=BOUNDS) as engine:
        results = answers(engine, prompt(900, 1), prompt(950, 2))
        assert engine.snapshot().sparse.compactions == 2
    assert all(r.done.usage.sparse.actual_ratio > ratio - 0.1 for r in results)


def test_lost_attention_keeps_the_full_cache(tiny, dense) -> None:
    """Judged before anything is dropped: nothing is lost."""
    with running(tiny, **SIZES, hysparse=CONFIG, guard=GuardBounds(min_mass_kept=0.99)) as engine:
        (result,) = answers(engine, prompt(600))
        stats = engine.snapshot().sparse
    assert stats.fallbacks == {"mass": 1}
    assert stats.compactions == 0
    assert result.ids == answers(dense, prompt(600))[0].ids


def test_signals_that_cross_later_compute_all_again(tiny, dense) -> None:
    """What follows equals dense. (A60)"""
    engine = stepped(tiny, **SIZES, **COMPACT)
    stream = engine.submit(request(prompt(300), 400))
    while engine.snapshot().generated_tokens < 100:
        engine.step()
    assert engine.snapshot().sparse.compactions == 1
    sequence = engine._scheduler.running[0]
    sequence.sparse._guard.bounds = GuardBounds(min_mass_kept=0.99)
    while not engine.snapshot().sparse.fallbacks:
        assert engine.step()
    noticed = engine.snapshot().generated_tokens
    assert noticed <= REVIEW_TOKENS + 1
    run_steps(engine)
    result = collect(stream)
    assert result.done.usage.sparse.fallback == "mass"
    (expected,) = answers(dense, prompt(300) + result.ids[:noticed], tokens=400 - noticed)
    assert result.ids[noticed:] == expected.ids
    engine.check_integrity()


def test_the_pool_is_smaller_by_what_is_dropped(tiny) -> None:
    """The same memory holds more tokens."""
    memory = 40_000_000
    sizes = {"max_total_tokens": 1000, "cache_memory_bytes": memory}
    plain, small = EngineConfig(**sizes), EngineConfig(**sizes, **COMPACT)
    assert num_pages(tiny, small) > 1.4 * num_pages(tiny, plain)
    engine = Engine(tiny, small)
    assert engine._runner.pool.num_bytes <= memory
    assert engine._runner.pool.num_bytes > 0.9 * memory


def test_fp8_pages_serve(tiny) -> None:
    with running(tiny, **SIZES, **COMPACT, kv_dtype=torch.float8_e4m3fn) as engine:
        (result,) = answers(engine, prompt(600))
    assert result.done.usage.sparse.actual_ratio > 0.5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("size", [32, 64])
def test_blocks_are_powers_of_two_aligned_and_whole(tiny, dtype, size: int) -> None:
    """The index-aware layout: what a head's kept tokens are laid into, a page of K and V, is a
    block of a power of two of at least 4,096 bytes at a multiple of 256."""
    config = EngineConfig(page_size=size, kv_dtype=dtype, **COMPACT)
    for layout in page_layouts(tiny, config):
        block = layout.head_page_bytes
        assert block >= 4096
        assert block & (block - 1) == 0
        assert layout.page_bytes % 256 == 0
        assert layout.tile_bytes % 256 == 0
