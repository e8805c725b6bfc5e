"""Compact mode over host memory and disk: what sparse layers give up comes back for the next one.

Every pool here is filled with NaN, so that a page that did not come shows.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.driving import SIZES, answers, collect, request, running, token_facts
from support.driving import random_prompt as prompt
from support.tiered import HOST, poison, serve, slow_load, tiered

from bicl.frontends.http.engine import Engine
from bicl.frontends.http.engine.compact import REVIEW_TOKENS
from bicl.frontends.http.request import SparseOptions
from bicl.sparse.config import HySparseConfig
from bicl.sparse.guard import GuardBounds

CONFIG = HySparseConfig(
    text_kind="off", layers="1-2/3", floor_tokens=128, sparsity_ratio=0.6, mode="compact", recent=1
)
COMPACT = {**SIZES, "hysparse": CONFIG, "guard": GuardBounds(min_mass_kept=0.0)}


def evict_all(engine: Engine) -> None:
    """Both groups forget their prefixes; the tiers keep what they have."""
    assert engine._tiers.settle(10)
    manager = engine._scheduler.manager
    for group in (manager, manager.group):
        group._prefixes.evict(group.usable_pages)
        assert group.gauges().cached_pages == 0
    poison(engine)


@pytest.fixture(scope="module")
def without(tiny) -> Engine:
    """The same server without a tier."""
    with running(tiny, **COMPACT, prefix_caching=False) as engine:
        yield engine


@pytest.mark.parametrize("length", [200, 321, 600, 641])
def test_a_prompt_comes_back_and_is_compacted_again(tiny, without, length: int) -> None:
    ids = prompt(length)
    (expected,) = answers(without, ids)
    with tiered(tiny, **COMPACT) as engine:
        (first,) = serve(engine, request(ids, 24))
        before = engine.snapshot().sparse
        evict_all(engine)
        (second,) = serve(engine, request(ids, 24))
        after = engine.snapshot().sparse
    usage = second.done.usage
    assert token_facts(first) == token_facts(expected)
    assert second.ids == first.ids
    assert usage.cached_tokens == usage.cached_host_tokens == (length - 32) // 64 * 64
    assert (before.compactions, after.compactions) == (1, 2)
    assert after.dropped_pages == 2 * before.dropped_pages
    assert usage.sparse.actual_ratio == first.done.usage.sparse.actual_ratio > 0.2


def test_it_comes_back_whole(tiny, dense) -> None:
    """For who wants every key, too."""
    ids = prompt(600)
    with tiered(tiny, **COMPACT) as engine:
        serve(engine, request(ids, 2))
        evict_all(engine)
        (result,) = serve(engine, request(ids, 24, sparse=SparseOptions(sparsity_ratio=0.0)))
    assert result.done.usage.cached_host_tokens == 512
    assert result.ids == answers(dense, ids)[0].ids


def test_pages_of_twins_that_left_come_although_the_others_are_there(tiny, without) -> None:
    ids = prompt(600)
    with tiered(tiny, **COMPACT) as engine:
        (first,) = serve(engine, request(ids, 24))
        assert engine._tiers.settle(10)
        group = engine._scheduler.manager.group
        group._prefixes.evict(5)
        assert engine._scheduler.manager.cached_tokens(ids) == 256
        (second,) = serve(engine, request(ids, 24))
    usage = second.done.usage
    assert (usage.cached_tokens, usage.cached_host_tokens) == (512, 256)
    assert second.ids == first.ids == answers(without, ids)[0].ids


def test_disk_outlives_the_server_and_is_a_dense_ones_too(tiny, without, tmp_path: Path) -> None:
    """Pages in the tiers are whole: they mean the same to any server of these weights."""
    disk = {**HOST, "disk_cache_dir": tmp_path, "disk_cache_bytes": 64 << 20}
    ids = prompt(400)
    with tiered(tiny, **COMPACT, **disk) as engine:
        (first,) = serve(engine, request(ids, 24))
    for modes in (COMPACT, {key: COMPACT[key] for key in SIZES}):
        with tiered(tiny, **modes, **disk) as engine:
            engine._tiers.costs.prefill_tokens_per_second = 1.0  # whatever the disk does here
            engine._tiers.costs.disk_bytes_per_second = 1e9
            (again,) = serve(engine, request(ids, 24))
        assert again.done.usage.cached_disk_tokens == (320 if "hysparse" in modes else 384)
        assert again.ids[:1] == first.ids[:1]
    assert first.ids == answers(without, ids)[0].ids


def test_a_request_that_is_aborted_while_its_pages_come(tiny, monkeypatch) -> None:
    ids = prompt(600)
    with tiered(tiny, **COMPACT) as engine:
        (first,) = serve(engine, request(ids, 8))
        evict_all(engine)
        begun, release = slow_load(engine, monkeypatch)
        stream = engine.submit(one := request(ids, 8))
        engine._scheduler.add(engine._arrivals.popleft())
        engine._scheduler.plan()
        assert begun.wait(20)
        engine.abort(one.id)
        with engine._changed:
            engine._take_arrivals()
        manager = engine._scheduler.manager
        assert manager.waits_for_copies
        assert manager.group.gauges().in_use_pages >= manager.gauges().loading_pages > 0
        engine.check_integrity()
        release.set()
        assert engine._tiers.settle(10)
        engine.check_integrity()
        assert manager.gauges().in_use_pages == manager.group.gauges().in_use_pages == 0
        assert collect(stream).tokens == []
        (second,) = serve(engine, request(ids, 8))
    assert second.ids == first.ids


def test_pages_that_do_not_come_are_computed(tiny, monkeypatch) -> None:
    ids = prompt(600)
    with tiered(tiny, **COMPACT) as engine:
        (first,) = serve(engine, request(ids, 24))
        evict_all(engine)

        def fails(*arguments):
            raise OSError("bus error")

        monkeypatch.setattr(engine._tiers.mover, "load", fails)
        (second,) = serve(engine, request(ids, 24))
        assert engine.snapshot().tiers.failures["copy"] == 1
    assert second.done.usage.cached_tokens == 0
    assert second.ids == first.ids


def test_many_requests_on_few_pages_lose_nothing(tiny, without) -> None:
    """Whole and compact requests side by side, twins that leave as soon as tokens are dropped."""
    prompts = [prompt(300 + 60 * n, n) for n in range(6)]
    expected = [answers(without, each)[0].ids for each in prompts]
    with tiered(tiny, **{**COMPACT, "num_pages": 20}) as engine:
        for _ in range(3):
            results = serve(engine, *[request(each, 24) for each in prompts])
            assert [result.ids for result in results] == expected
        assert engine._tiers.settle(10)
        stats = engine.snapshot()
        group = engine._scheduler.manager.group.gauges()
    assert stats.tiers.loaded_pages > 0
    assert stats.tiers.saved_pages >= sum(len(each) // 64 for each in prompts)
    assert (stats.pages_in_use, group.in_use_pages) == (0, 0)


def test_what_is_judged_again_is_as_without_a_tier(tiny, without) -> None:
    ids, count = prompt(300), 600
    (expected,) = answers(without, ids, tokens=count)
    with tiered(tiny, **COMPACT) as engine:
        for cached in (0, 256):
            (result,) = serve(engine, request(ids, count))
            assert result.ids == expected.ids
            assert result.done.usage.cached_host_tokens == cached
            evict_all(engine)
        stats = engine.snapshot()
    assert stats.sparse.compactions == 2 * (1 + count // REVIEW_TOKENS)
    assert stats.tiers.saved_pages == 300 // 64  # nothing of what was generated


def test_a_started_server_measures_its_tiers(tiny, without) -> None:
    ids = prompt(600)
    with running(tiny, **COMPACT, **HOST) as engine:
        costs = engine._tiers.costs
        assert costs.host_bytes_per_second > 0
        assert costs.prefill_tokens_per_second > 0
        results = [answers(engine, ids)[0].ids for _ in range(2)]
    assert results == [answers(without, ids)[0].ids] * 2


def test_fp8_pages_come_back(tiny) -> None:
    ids = prompt(600)
    with tiered(tiny, **COMPACT, kv_dtype=torch.float8_e4m3fn) as engine:
        (first,) = serve(engine, request(ids, 24))
        evict_all(engine)
        (second,) = serve(engine, request(ids, 24))
    assert second.done.usage.cached_host_tokens >= 512
    assert second.ids == first.ids
