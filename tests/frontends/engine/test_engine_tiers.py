"""The engine brings prefixes back from host memory and disk: the same tokens, computed less often.

Every pool here is filled with NaN, so that a page that did not come shows. (A40)
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.driving import collect, generate, request, run_steps, running, stepped
from support.driving import random_prompt as prompt
from support.tiered import HOST, cold, forget_pool, serve, tiered

from bicl.errors import ConfigError
from bicl.frontends.http.engine import Engine, EngineConfig
from bicl.frontends.http.engine.sequence import Sequence
from bicl.sparse import index
from bicl.sparse.config import HySparseConfig
from bicl.sparse.guard import GuardBounds


@pytest.mark.parametrize("length", [65, 128, 129, 230, 400])
def test_prefix_comes_back_from_host_memory(tiny, length: int) -> None:
    ids = prompt(length)
    with tiered(tiny) as engine:
        (first,) = serve(engine, request(ids))
        forget_pool(engine)
        (second,) = serve(engine, request(ids))
        usage = second.done.usage
    assert first.ids == second.ids == cold(tiny, request(ids))
    assert usage.cached_tokens == usage.cached_host_tokens == (length - 1) // 64 * 64


@pytest.mark.parametrize("page_size", [64, 32])
def test_the_index_of_a_page_comes_back_with_it(tiny, page_size: int) -> None:
    """Every sparse step's audit computes it again and compares."""
    ids = prompt(400)
    sparse = HySparseConfig(text_kind="off", layers="0-2/3", floor_tokens=128, sparsity_ratio=0.6)
    bounds = GuardBounds(shadow_interval=1, min_mass_kept=0.0)
    with tiered(tiny, hysparse=sparse, guard=bounds, page_size=page_size) as engine:
        (first,) = serve(engine, request(ids))
        forget_pool(engine)
        for index in engine._runner.shadow.sparse.indexes.values():
            index.vectors.fill_(0x55)
        (second,) = serve(engine, request(ids))
        stats = engine.snapshot().sparse
    assert second.done.usage.cached_host_tokens == 384
    assert second.ids == first.ids
    assert stats.shadow_steps > 0
    assert (stats.stale_pages, sum(stats.fallbacks.values())) == (0, 0)


def test_pool_and_host_serve_one_prefix_together(tiny) -> None:
    """Two pages are still in the pool, two only in host memory."""
    ids = prompt(300)
    with tiered(tiny, num_pages=12) as engine:
        serve(engine, request(ids, 1))
        engine._tiers.settle(10)
        manager = engine._scheduler.manager
        seq = manager.acquire([1] * (manager.max_tokens - 2 * 64), reuse=False)
        manager.release(seq, keep=False)
        assert manager.cached_tokens(ids) == 128
        (second,) = serve(engine, request(ids))
        usage = second.done.usage
    assert second.ids == cold(tiny, request(ids))
    assert (usage.cached_tokens, usage.cached_host_tokens) == (256, 128)


def test_three_turns_reuse_the_replies(tiny) -> None:
    """Cached tokens: all full pages of turn 1 and 2, from the pool and from host memory. (A75)"""
    with tiered(tiny) as engine:
        for forget in (False, True):
            ids = prompt(100, seed=int(forget))
            for turn in range(3):
                full = (len(ids) - 1) // 64 * 64
                expected = cold(tiny, request([*ids, 5, 6, 7], 40))
                (result,) = serve(engine, request([*ids, 5, 6, 7], 40))
                assert result.ids == expected
                if turn:
                    assert result.done.usage.cached_tokens >= full
                ids += [5, 6, 7, *result.ids]
                if forget:
                    forget_pool(engine)


def test_sixteen_requests_in_flight_share_one_fetch(tiny) -> None:
    ids = prompt(400)
    with tiered(tiny, max_batch_size=16, num_pages=200) as engine:
        (first,) = serve(engine, request(ids))
        forget_pool(engine)
        before = engine.snapshot()
        results = serve(engine, *[request(ids) for _ in range(16)])
        after = engine.snapshot()
    assert all(result.ids == first.ids for result in results)
    assert after.tiers.loaded_pages == 6
    assert after.prefilled_tokens - before.prefilled_tokens <= 16 * 64


def test_sixteen_requests_in_flight_compute_a_prefix_once(tiny) -> None:
    """They arrive in one step, each with a tail of its own."""
    ids = prompt(450)
    requests = [request([*ids, 10 + n], 4) for n in range(16)]
    expected = [cold(tiny, one) for one in requests[:2]]
    with tiered(tiny, max_batch_size=16, num_pages=200, max_batch_prefill_tokens=128) as engine:
        results = serve(engine, *requests)
        computed = engine.snapshot().prefilled_tokens
    assert [r.ids for r in results[:2]] == expected
    assert computed <= 451 + 15 * (451 - 448)


def test_tenants_and_adapters_share_nothing_below_the_pool(tiny) -> None:
    """(A11, A16, A17)"""
    ids = prompt(200)
    with tiered(tiny) as engine:
        serve(engine, request(ids, salt="a"))
        forget_pool(engine)
        found = {}
        for name, options in {
            "a": {"salt": "a"},
            "b": {"salt": "b"},
            "none": {},
            "adapter": {"salt": "a", "adapter_id": "x"},
        }.items():
            found[name] = serve(engine, request(ids, **options))[0].done.usage.cached_tokens
    assert found == {"a": 192, "b": 0, "none": 0, "adapter": 0}


def test_flush_reaches_every_tier(tiny, tmp_path: Path) -> None:
    """(A18)"""
    ids = prompt(200)
    with tiered(tiny, disk_cache_dir=tmp_path, disk_cache_bytes=1 << 30) as engine:
        serve(engine, request(ids))
        engine._tiers.settle(10)
        assert engine.flush_cache().tier_pages >= 6  # host and disk
        (again,) = serve(engine, request(ids))
        assert again.done.usage.cached_tokens == 0
    assert not list(tmp_path.rglob("*.tmp"))


def test_prefix_survives_a_restart_on_disk(tiny, tmp_path: Path) -> None:
    ids = prompt(330)
    disk = {"disk_cache_dir": tmp_path, "disk_cache_bytes": 1 << 30}
    with tiered(tiny, **disk) as engine:
        (first,) = serve(engine, request(ids))
    with tiered(tiny, **disk) as engine:
        (second,) = serve(engine, request(ids))
        usage = second.done.usage
        stats = engine.snapshot()
    assert second.ids == first.ids
    assert usage.cached_tokens == usage.cached_disk_tokens == 320
    assert (stats.disk_hit_tokens, stats.host_hit_tokens, stats.hit_tokens) == (320, 0, 320)


def test_other_weights_find_nothing_on_disk(tiny, tmp_path: Path) -> None:
    """(A18)"""
    ids = prompt(200)
    disk = {"disk_cache_dir": tmp_path, "disk_cache_bytes": 1 << 30}
    with tiered(tiny, **disk) as engine:
        serve(engine, request(ids))
    with tiered(replace(tiny, sha="other"), **disk) as engine:
        assert serve(engine, request(ids))[0].done.usage.cached_tokens == 0


def test_an_index_whose_records_mean_something_else_finds_nothing_on_disk(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has as many bytes. Pages without an index are found."""
    ids = prompt(200)
    disk = {"disk_cache_dir": tmp_path, "disk_cache_bytes": 1 << 30}
    sparse = {"hysparse": HySparseConfig(text_kind="off", layers="0-2/3")}
    found = []
    for records in (1, 1, 2):
        monkeypatch.setattr(index, "RECORDS", records)
        for options in (disk, disk | sparse):
            with tiered(tiny, **options) as engine:
                found.append(serve(engine, request(ids))[0].done.usage.cached_tokens)
    assert found == [0, 0, 192, 192, 192, 0]


def test_pages_come_while_the_request_queues(tiny) -> None:
    """The batch is full: the copy is done before the request is admitted."""
    ids = prompt(330)
    with tiered(tiny, max_batch_size=1) as engine:
        (first,) = serve(engine, request(ids))
        forget_pool(engine)
        decoding = engine.submit(request(prompt(20, seed=9), 30))
        engine.step()
        waiting = engine.submit(request(ids))
        engine.step()
        assert engine._tiers.settle(10)
        stats = engine.snapshot()
        assert (stats.queue_size, stats.batch_size, stats.tiers.loaded_pages) == (1, 1, 5)
        run_steps(engine)
        collect(decoding)
        result = collect(waiting)
    assert result.ids == first.ids
    assert result.done.usage.cached_host_tokens == 320


def test_host_memory_is_searched_beside_the_step(tiny) -> None:
    """The next plan looks only for the prompts that it holds something of."""
    ids = prompt(330)
    with tiered(tiny, max_batch_size=1) as engine:
        serve(engine, request(ids))
        forget_pool(engine)
        streams = [engine.submit(request(prompt(20, seed=9), 4))]
        streams += [engine.submit(request(each)) for each in (prompt(330, seed=8), ids)]
        engine.step()
        stranger, known = engine._scheduler.waiting
        assert (stranger.sought_in_host, known.pages is not None) == (True, True)
        later = engine.submit(request(ids[:200], 4))
        stranger_too = engine.submit(request(prompt(200, seed=7), 4))
        engine.step()
        sought = [sequence.sought_in_host for sequence in engine._scheduler.waiting]
        assert sought == [True, True, False, True]  # what is held is fetched by the next plan
        run_steps(engine)
        for stream in (*streams, later, stranger_too):
            collect(stream)


def test_pages_that_came_early_give_way_to_those_who_run(tiny) -> None:
    """A pool of eight pages, in which the running request needs the prefetched ones' room."""
    ids = prompt(250)
    with tiered(tiny, num_pages=8, max_batch_size=1) as engine:
        (first,) = serve(engine, request(ids))
        forget_pool(engine)
        running_one = engine.submit(request(prompt(60, seed=9), 400))
        engine.step()
        waiting = engine.submit(request(ids))
        run_steps(engine)
        assert engine.snapshot().preemptions == 0
        assert len(collect(running_one).ids) == 400
        assert collect(waiting).ids == first.ids


def test_fetch_is_skipped_where_computing_is_faster(tiny) -> None:
    ids = prompt(330)
    with tiered(tiny) as engine:
        (first,) = serve(engine, request(ids))
        forget_pool(engine)
        costs = engine._tiers.costs
        costs.host_bytes_per_second, costs.prefill_tokens_per_second = 1e6, 1e9
        (second,) = serve(engine, request(ids))
        stats = engine.snapshot()
    assert second.ids == first.ids
    assert second.done.usage.cached_tokens == 0
    assert stats.tiers.skipped_fetches == 1


def test_constant_pressure_on_pool_and_host(tiny) -> None:
    """Both tiers evict all the time; every output equals its cold run. (A19)"""
    requests = [request(prompt(64) + prompt(66 + 10 * s, seed=s + 1), 20) for s in range(6)]
    expected = [cold(tiny, one) for one in requests]
    one_page = 3 * 2 * 2 * 64 * 64 * 4
    with tiered(
        tiny, num_pages=8, max_batch_size=4, max_total_tokens=256, host_cache_bytes=5 * one_page
    ) as engine:
        for _ in range(6):
            results = serve(engine, *[request(one.prompt_ids, 20) for one in requests])
            assert [result.ids for result in results] == expected
        stats = engine.snapshot()
    assert stats.evicted_pages > 0
    assert stats.tiers.host_evicted_pages > 0
    assert stats.host_hit_tokens > 0


def test_disk_without_host_memory_is_refused(tiny, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="host cache"):
        stepped(tiny, disk_cache_dir=tmp_path, disk_cache_bytes=1 << 30)


def test_started_engine_measures_and_serves(tiny, tmp_path: Path) -> None:
    ids = prompt(400)
    with running(
        tiny, **HOST, disk_cache_dir=tmp_path, disk_cache_bytes=1 << 30, num_threads=1
    ) as engine:
        costs = engine._tiers.costs
        assert costs.host_bytes_per_second > 0
        assert costs.prefill_tokens_per_second > 0
        results = [generate(engine, request(ids))[0] for _ in range(2)]
    assert results[0].ids == results[1].ids


def test_only_the_engine_keeps_threads_of_openmp(tiny, tmp_path: Path) -> None:
    """With more of them than cores, every operation of every thread puts its own to sleep."""
    disk = {"disk_cache_dir": tmp_path, "disk_cache_bytes": 1 << 30}
    started: list[Engine] = []
    counted = threading.Event()

    def start() -> None:  # on a thread that has none yet, and stays
        started.append(Engine(tiny, EngineConfig(512, **HOST, **disk, num_threads=2)).start())
        counted.wait(60)

    starter, threads = threading.Thread(target=start), torch.get_num_threads()
    before = threads_of_others()
    starter.start()
    try:
        while not started:
            assert starter.is_alive()
            time.sleep(0.01)
        (engine,) = started
        generate(engine, request(prompt(400)))
        assert engine._tiers.settle(10)
        assert engine.snapshot().tiers.saved_pages == 6
        assert len(threads_of_others() - before) <= 1
    finally:
        counted.set()
        starter.join()
        started[0].stop()
        torch.set_num_threads(threads)


def threads_of_others() -> set[int]:
    """Ids of this process's threads that Python did not start."""
    ours = {thread.native_id for thread in threading.enumerate()}
    return {int(name) for name in os.listdir("/proc/self/task")} - ours


def test_pin_protects_what_only_host_memory_holds(tiny) -> None:
    ids, one_page = prompt(200), 3 * 2 * 2 * 64 * 64 * 4
    with tiered(tiny, host_cache_bytes=10 * one_page) as engine:
        serve(engine, request(ids))
        forget_pool(engine)
        manager = engine._scheduler.manager
        assert manager.pin(ids) == 192
        for seed in range(1, 6):
            serve(engine, request(prompt(300, seed=seed)))
            forget_pool(engine)
        assert serve(engine, request(ids))[0].done.usage.cached_host_tokens == 192
        forget_pool(engine)
        assert manager.unpin(ids)
        assert not manager.unpin(prompt(200, seed=99))
        for seed in range(6, 11):
            serve(engine, request(prompt(300, seed=seed)))
            forget_pool(engine)
        assert serve(engine, request(ids))[0].done.usage.cached_tokens == 0


def test_pages_that_come_while_the_step_is_planned_are_not_overlooked(tiny, monkeypatch) -> None:
    """On their way when the request is admitted, there when the plan is made."""
    ids = prompt(330)
    with tiered(tiny) as engine:
        (first,) = serve(engine, request(ids))
        forget_pool(engine)
        looks = iter([True])
        monkeypatch.setattr(Sequence, "is_arriving", property(lambda self: next(looks, False)))
        stream = engine.submit(request(ids))
        assert engine.step()
        assert engine.snapshot().generated_tokens > first.done.usage.generated_tokens
        run_steps(engine)
        assert collect(stream).ids == first.ids


def test_pages_are_saved_behind_the_way_of_the_tokens(tiny, monkeypatch) -> None:
    """A copy of many pages that began first would hold up the step's tokens."""
    order = []
    with tiered(tiny) as engine:
        mark, choose = engine._tiers.mover.mark, engine._emitter.choose
        monkeypatch.setattr(engine._tiers.mover, "mark", lambda: order.append("save") or mark())
        monkeypatch.setattr(
            engine._emitter, "choose", lambda *args: order.append("tokens") or choose(*args)
        )
        serve(engine, request(prompt(130), 1))
    assert order == ["tokens", "save"]
