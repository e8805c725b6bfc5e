"""HySparse through the whole engine."""

from __future__ import annotations

import pytest
import torch
from support.driving import (
    SIZES,
    answers,
    collect,
    generate,
    request,
    run_steps,
    running,
    stepped,
    token_facts,
)
from support.driving import random_prompt as prompt
from support.tiny_models import tiny_loaded

from bicl.errors import ConfigError
from bicl.frontends.http.engine import Engine
from bicl.frontends.http.request import SparseOptions
from bicl.sparse.config import HySparseConfig
from bicl.sparse.gate_file import save_gate
from bicl.sparse.guard import GuardBounds
from bicl.sparse.sgm import make_gate

LAYERS = 3
CONFIG = HySparseConfig(text_kind="off", layers="0-2/3", floor_tokens=128, sparsity_ratio=0.6)
# A random model attends to everything alike: no choice of tiles could keep most of it.
BOUNDS = GuardBounds(shadow_interval=8, min_mass_kept=0.0)
SPARSE = {"hysparse": CONFIG, "guard": BOUNDS}


@pytest.fixture(scope="module")
def sparse(tiny) -> Engine:
    with running(tiny, **SIZES, **SPARSE) as engine:
        yield engine


# --- where nothing may change ------------------------------------------------------------------
@pytest.mark.parametrize("length", [1, 20, 63, 64, 65, 104])
def test_up_to_the_floor_all_is_dense_to_the_bit(dense, sparse, length: int) -> None:
    """(A57)"""
    (expected,), (result,) = answers(dense, prompt(length)), answers(sparse, prompt(length))
    assert token_facts(result) == token_facts(expected)
    told = result.done.usage.sparse
    assert (told.tiles_read, told.tiles_total, told.shadow_steps) == (0, 0, 0)


def test_a_request_that_asks_for_none_is_dense_to_the_bit(dense, sparse) -> None:
    (expected,) = answers(dense, prompt(600))
    (result,) = answers(sparse, prompt(600), sparse=SparseOptions(sparsity_ratio=0.0))
    assert token_facts(result) == token_facts(expected)
    assert result.done.usage.sparse.actual_ratio == 0.0


def test_a_long_request_leaves_tiles_out_and_says_how_many(sparse) -> None:
    """(A58)"""
    before = sparse.snapshot().sparse
    (result,) = answers(sparse, prompt(600))
    told, after = result.done.usage.sparse, sparse.snapshot().sparse
    assert told.sparsity_ratio == 0.6
    assert told.actual_ratio == pytest.approx(0.6, abs=0.05)
    assert told.tiles_read < told.tiles_total
    assert told.shadow_steps == 3  # of 23 decode steps, one in eight
    assert told.fallback == ""
    assert 0.0 < told.mass_kept < 1.0
    assert set(told.entropy_by_group) == set(after.entropy)
    assert told.entropy_by_group["sparse"] == told.entropy > 0.0
    assert after.tiles_skipped - before.tiles_skipped == told.tiles_total - told.tiles_read
    assert after.rows["sparse"] - before.rows.get("sparse", 0) == 23


def test_a_requests_own_ratio_holds_beside_others(sparse) -> None:
    asked = (0.3, 0.9, 0.0)
    results = generate(
        sparse,
        *[
            request(prompt(700, seed), 16, sparse=SparseOptions(sparsity_ratio=ratio))
            for seed, ratio in enumerate(asked)
        ],
    )
    told = [result.done.usage.sparse for result in results]
    assert [each.sparsity_ratio for each in told] == list(asked)
    assert told[0].actual_ratio == pytest.approx(0.3, abs=0.1)
    assert told[1].actual_ratio > 0.6
    assert told[2].tiles_total == 0


def test_half_of_a_hundred_windows_is_fifty(long_tiny) -> None:
    """One sink and two recent windows are among the fifty. (A59)"""
    config = HySparseConfig(
        text_kind="off", layers="0-2/3", sparsity_ratio=0.5, floor_tokens=0, first=1, recent=2
    )
    engine = stepped(
        long_tiny,
        max_total_tokens=6500,
        max_batch_size=1,
        max_batch_prefill_tokens=6500,
        hysparse=config,
        guard=BOUNDS,
    )
    stream = engine.submit(request(prompt(6399), 2))  # one decode step, over 6,400 tokens
    run_steps(engine)
    told = collect(stream).done.usage.sparse
    assert (told.tiles_read, told.tiles_total) == (50 * LAYERS, 100 * LAYERS)
    stats = engine.snapshot().sparse
    assert (stats.tiles_read, stats.tiles_skipped) == (50 * LAYERS, 50 * LAYERS)
    assert stats.actual_ratio == pytest.approx(0.5)


def test_layers_leave_out_what_a_fit_gave_them(long_tiny, tmp_path) -> None:
    """Of 100 tiles 50, 25 and 75: what is counted is what the shadow steps saw, no drift."""
    gate = make_gate("centroids", range(LAYERS), long_tiny.geometry.layers[0].head_dim)
    gate.shares.copy_(torch.tensor([1.0, 1.5, 0.5]))
    save_gate(tmp_path / "gate", gate)
    config = HySparseConfig(
        text_kind="off",
        layers="0-2/3",
        sparsity_ratio=0.5,
        floor_tokens=0,
        gate_path=str(tmp_path / "gate"),
    )
    sizes = {"max_total_tokens": 6500, "max_batch_size": 1, "max_batch_prefill_tokens": 6500}
    bounds = GuardBounds(shadow_interval=1, min_mass_kept=0.0, min_sparsity_share=1.0,
                         max_entropy_rise=0.0)  # fmt: skip
    engine = stepped(long_tiny, **sizes, hysparse=config, guard=bounds)
    stream = engine.submit(request(prompt(6350), 5))
    run_steps(engine)
    told = collect(stream).done.usage.sparse
    assert told.fallback == ""
    assert (told.tiles_read, told.tiles_total) == (4 * (50 + 25 + 75), 4 * 300)


def test_steps_that_would_save_too_little_run_dense(tiny) -> None:
    """What a request alone cannot pay for, two together can."""
    prompts = [prompt(450, seed) for seed in range(2)]

    def run(*requests, **config):
        sizes = SIZES | {"max_batch_prefill_tokens": 1000}  # both begin in one step
        engine = stepped(tiny, **sizes, guard=BOUNDS, **config)
        if engine._sparse is not None:
            engine._sparse._least_skipped = 6  # of 8 tiles the ratio leaves 4 out
        streams = [engine.submit(request(ids, 8)) for ids in requests]
        run_steps(engine)
        return [collect(stream) for stream in streams], engine.snapshot().sparse

    alone, stats = run(prompts[0], hysparse=CONFIG)
    dense, _ = run(prompts[0])
    assert stats.rows == {"little": 7}
    assert stats.tiles_skipped == 0
    assert [t.token.logprob for t in alone[0].tokens] == [t.token.logprob for t in dense[0].tokens]
    assert alone[0].done.usage.sparse.tiles_total == 0
    _, stats = run(*prompts, hysparse=CONFIG)
    assert stats.rows == {"sparse": 14}
    assert stats.tiles_skipped == 14 * 4 * LAYERS


@pytest.mark.parametrize("length", [2047, 2048, 2049, 5200])
def test_first_and_last_windows_are_always_read(long_tiny, monkeypatch, length: int) -> None:
    """K passes the length and falls below it: sinks and the newest tokens stay. (A55, A56)"""
    config = HySparseConfig(text_kind="off", layers="0-2/3", max_k=32, floor_tokens=256)
    engine = stepped(
        long_tiny,
        max_total_tokens=5300,
        max_batch_size=1,
        max_batch_prefill_tokens=5300,
        hysparse=config,
        guard=BOUNDS,
    )
    backend = engine._runner.shadow.sparse
    select, seen = backend.select, []

    def spy(query, index, meta, scale):
        chosen = select(query, index, meta, scale)
        seen.append((meta, chosen))
        return chosen

    monkeypatch.setattr(backend, "select", spy)
    engine.submit(request(prompt(length), 4))
    run_steps(engine)
    assert seen
    for meta, chosen in seen:
        tokens, pages = int(meta.cache_seqlens[0]), -(-int(meta.cache_seqlens[0]) // 64)
        read = -(-int(chosen.cache_seqlens[0]) // 64)
        assert read <= 32
        assert (tokens - int(chosen.cache_seqlens[0])) % 64 == 0  # the last page stays partial
        table = meta.page_table[0, :pages].tolist()
        for head in chosen.page_table[0]:
            kept = head[:read].tolist()
            assert kept[0] == table[0]
            assert kept[-2:] == table[-2:]
            order = [table.index(page) for page in kept]
            assert order == sorted(set(order))


# --- with the rest of the engine ---------------------------------------------------------------
def test_batch_mates_do_not_change_a_sparse_answer(sparse) -> None:
    """Although some rows decode beside the others' prefill."""
    prompts = [prompt(length, length) for length in (400, 600, 900)]
    alone = [answers(sparse, each)[0].ids for each in prompts]
    sparse.flush_cache()
    together = answers(sparse, *prompts)
    assert [result.ids for result in together] == alone


def test_warm_prompts_answer_like_cold_ones(sparse) -> None:
    sparse.flush_cache()
    cold, warm = (answers(sparse, prompt(640, 9))[0] for _ in range(2))
    assert cold.done.usage.cached_tokens == 0
    assert warm.done.usage.cached_tokens >= 576
    assert warm.ids == cold.ids


def test_what_was_approximated_is_given_to_nobody(tiny, sparse) -> None:
    """A dense request that continues a sparse answer computes that answer's tokens itself."""
    sparse.flush_cache()
    first = prompt(500, 3)
    (answer,) = answers(sparse, first, tokens=200)
    longer = first + answer.ids + prompt(10, 4)
    none = SparseOptions(sparsity_ratio=0.0)
    (result,) = answers(sparse, longer, sparse=none)
    assert result.done.usage.cached_tokens <= 500
    with running(tiny, **SIZES) as fresh:
        (expected,) = answers(fresh, longer)
    assert result.ids == expected.ids


def test_rows_beside_a_prefill_leave_tiles_out_too(tiny) -> None:
    """Chunked prefill and sparse decode share steps, and a shadow step."""
    engine = stepped(tiny, **{**SIZES, "max_batch_prefill_tokens": 100}, **SPARSE)
    first = engine.submit(request(prompt(400), 40))
    while engine.snapshot().generated_tokens < 6:
        engine.step()
    second = engine.submit(request(prompt(900, 6), 8))
    before = engine.snapshot().sparse
    while engine.snapshot().prefilled_tokens < 1300:
        engine.step()
    during = engine.snapshot().sparse
    assert during.rows["sparse"] - before.rows["sparse"] == 9
    assert during.tiles_skipped > before.tiles_skipped
    assert during.shadow_steps == before.shadow_steps + 1
    run_steps(engine)
    beside = collect(first)
    assert beside.done.usage.sparse.fallback == ""
    assert len(collect(second).ids) == 8
    alone = engine.submit(request(prompt(400), 40))
    run_steps(engine)
    assert collect(alone).ids == beside.ids


def test_preempted_requests_finish(tiny) -> None:
    with running(tiny, **{**SIZES, "num_pages": 16}, **SPARSE) as engine:
        results = answers(engine, *[prompt(400, seed) for seed in range(4)], tokens=120)
        assert engine.snapshot().preemptions > 0
    assert all(len(result.ids) == 120 for result in results)


def test_fp8_pages_serve(tiny) -> None:
    """(A60)"""
    with running(tiny, **SIZES, **SPARSE, kv_dtype=torch.float8_e4m3fn) as engine:
        (result,) = answers(engine, prompt(600))
        told = result.done.usage.sparse
    assert told.actual_ratio == pytest.approx(0.6, abs=0.05)
    assert told.fallback == ""  # the index of fp8 pages is computed again to the bit


def test_pages_of_32_tokens_serve(tiny) -> None:
    with running(tiny, **SIZES, **SPARSE, page_size=32) as engine:
        (result,) = answers(engine, prompt(600))
    assert result.done.usage.sparse.actual_ratio == pytest.approx(0.6, abs=0.05)


def test_layers_with_a_window_stay_dense_and_a_model_of_them_is_refused() -> None:
    """(A60)"""
    with pytest.raises(ConfigError, match="sliding window"):
        stepped(tiny_loaded("mistral-window"), **SIZES, **SPARSE)
    engine = stepped(tiny_loaded("gemma2"), **SIZES, **SPARSE)
    assert set(engine._runner.shadow.sparse.indexes) == {1}


# --- live signals ------------------------------------------------------------------------------
FAULTS = {
    "random": lambda vectors: vectors.random_(0, 256),
    "zero": lambda vectors: vectors.zero_(),
    "stale": lambda vectors: vectors.copy_(vectors.roll(3, dims=0)),
}


@pytest.mark.parametrize("bad_layers", [(0, 1, 2), (0,), (2,)])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_index_is_noticed_and_what_follows_equals_dense(
    dense, tiny, fault: str, bad_layers: tuple[int, ...]
) -> None:
    """Within 64 tokens the request is on the full cache, as if it had never left it, with the
    interval of a server. (A60)"""
    bounds = GuardBounds(min_mass_kept=0.0)
    engine = stepped(tiny, **SIZES, hysparse=CONFIG, guard=bounds)
    stream = engine.submit(request(prompt(600), 100))
    for _ in range(14):
        engine.step()
    for layer in bad_layers:
        FAULTS[fault](engine._runner.shadow.sparse.indexes[layer].vectors)
    before = engine.snapshot().generated_tokens
    while not engine.snapshot().sparse.fallbacks.get("index"):
        assert engine.step()
    noticed = engine.snapshot().generated_tokens
    assert noticed - before <= 64
    run_steps(engine)
    result = collect(stream)
    told = result.done.usage.sparse
    assert told.fallback == "index"
    kept = result.ids[:noticed]
    (expected,) = answers(dense, prompt(600) + kept, tokens=100 - noticed)
    assert result.ids[noticed:] == expected.ids
    stats = engine.snapshot().sparse
    assert stats.stale_pages > 0
    assert stats.rows["fallback"] > 0


def test_the_index_is_whole_again_for_the_next_request(tiny) -> None:
    engine = stepped(tiny, **SIZES, **SPARSE)
    stream = engine.submit(request(prompt(600), 30))
    for _ in range(4):
        engine.step()
    for index in engine._runner.shadow.sparse.indexes.values():
        index.vectors.zero_()
    run_steps(engine)
    assert collect(stream).done.usage.sparse.fallback == "index"
    second = engine.submit(request(prompt(600), 30))  # shares the first one's pages
    run_steps(engine)
    told = collect(second).done
    assert told.usage.cached_tokens >= 512
    assert told.usage.sparse.fallback == ""


def test_too_little_attention_in_the_tiles_goes_back(tiny, dense) -> None:
    bounds = GuardBounds(min_mass_kept=0.9)
    with running(tiny, **SIZES, hysparse=CONFIG, guard=bounds) as engine:
        (result,) = answers(engine, prompt(600))
        assert engine.snapshot().sparse.fallbacks == {"mass": 1}
    assert result.done.usage.sparse.fallback == "mass"
    # Its very first sparse step was measured and is not used: all of it is dense.
    assert result.ids == answers(dense, prompt(600))[0].ids
