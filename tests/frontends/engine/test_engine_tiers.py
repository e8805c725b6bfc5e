"""The engine brings prefixes back from host memory and disk: the same tokens, computed less often.

Every pool here is filled with NaN, so that a page that did not come shows. (A40)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.driving import collect, generate, request, run_steps, running, stepped
from support.driving import random_prompt as prompt

from bicl.cache.keys import Namespace, pack_ids
from bicl.errors import ConfigError
from bicl.frontends.http.engine import Engine
from bicl.frontends.http.engine.sequence import Sequence
from bicl.frontends.http.request import RequestDone
from bicl.sparse.config import HySparseConfig
from bicl.sparse.guard import GuardBounds

HOST = {"host_cache_bytes": 64 << 20}


@contextmanager
def tiered(loaded, **config) -> Iterator[Engine]:
    """An engine without a thread, with a host tier; its pages are counted at the end."""
    engine = stepped(loaded, **{**HOST, **config})
    poison(engine)
    try:
        yield engine
        assert engine._tiers.settle(10)
        engine.check_integrity()
        assert engine._tiers.check_integrity()
        stats = engine.snapshot()
        assert (stats.pages_in_use, stats.pages_loading) == (0, 0)
    finally:
        engine.stop()


def poison(engine: Engine) -> None:
    for layer in engine._runner.pool.layers:
        layer.pages.fill_(torch.nan)


def serve(engine: Engine, *requests):
    streams = [engine.submit(one) for one in requests]
    run_steps(engine)
    return [collect(stream) for stream in streams]


def forget_pool(engine: Engine) -> None:
    """Everything leaves the pool, as under pressure; the tiers keep what they have."""
    assert engine._tiers.settle(10)
    manager = engine._scheduler.manager
    for _ in range(2):
        seq = manager.acquire([1] * manager.max_tokens, reuse=False)
        assert seq is not None
        manager.release(seq, keep=False)
    assert manager.cached_tokens(prompt(500)) == 0
    poison(engine)


def cold(loaded, one, **config):
    with running(loaded, prefix_caching=False, **config) as engine:
        return generate(engine, one)[0].ids


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


def test_the_index_of_a_page_comes_back_with_it(tiny) -> None:
    """Every sparse step's audit computes it again and compares."""
    ids = prompt(400)
    sparse = HySparseConfig(text_kind="off", layers="0-2/3", floor_tokens=128, sparsity_ratio=0.6)
    bounds = GuardBounds(shadow_interval=1, min_mass_kept=0.0)
    with tiered(tiny, hysparse=sparse, guard=bounds) as engine:
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


@pytest.mark.parametrize("fault", ["short", "corrupt", "missing", "foreign"])
def test_a_bad_file_is_computed_instead(tiny, tmp_path: Path, fault: str) -> None:
    """The second of five pages: the first still comes from disk."""
    ids = prompt(330)
    disk = {"disk_cache_dir": tmp_path, "disk_cache_bytes": 1 << 30}
    with tiered(tiny, **disk) as engine:
        (first,) = serve(engine, request(ids))
        chain, _ = engine._scheduler.manager._prefixes._beyond(pack_ids(ids), Namespace(), None)
    names = [next(tmp_path.rglob(f"{chain.key(page).hex()}-*.page")) for page in (1, 2)]
    if fault == "short":
        names[0].write_bytes(names[0].read_bytes()[:-100])
    elif fault == "corrupt":
        damaged = bytearray(names[0].read_bytes())
        damaged[9000] ^= 1
        names[0].write_bytes(damaged)
    elif fault == "missing":
        names[0].unlink()
    else:
        names[0].write_bytes(names[1].read_bytes())
    with tiered(tiny, **disk) as engine:
        if fault == "missing":
            assert chain.key(1) not in engine._tiers._disk._store
        (second,) = serve(engine, request(ids))
        failures = engine.snapshot().tiers.failures
    assert second.ids == first.ids
    assert second.done.usage.cached_tokens == 64
    assert failures.get(fault, 0) == (0 if fault == "missing" else 1)


def test_late_disk_is_not_waited_for_longer_than_computing_takes(tiny, tmp_path, monkeypatch):
    ids = prompt(330)
    disk = {"disk_cache_dir": tmp_path, "disk_cache_bytes": 1 << 30}
    with tiered(tiny, **disk) as engine:
        (first,) = serve(engine, request(ids))
    release = threading.Event()
    with tiered(tiny, **disk) as engine:
        store = engine._tiers._disk._store
        read = store.read
        monkeypatch.setattr(store, "read", lambda *arguments: (release.wait(20), read(*arguments)))
        engine._tiers.costs.prefill_tokens_per_second = 1e5
        began = time.monotonic()
        (second,) = serve(engine, request(ids))
        assert time.monotonic() - began < 10
        assert engine.snapshot().tiers.failures["late"] == 1
        release.set()
    assert second.ids == first.ids
    assert second.done.usage.cached_tokens == 0


def test_a_failed_copy_is_computed_instead(tiny, monkeypatch) -> None:
    """It fails in the last layer, when the step is under way; a batch mate is not harmed."""
    ids, other = prompt(330), prompt(40, seed=3)
    with tiered(tiny) as engine:
        (first,) = serve(engine, request(ids))
        expected = cold(tiny, request(other, 20))
        forget_pool(engine)
        load = engine._tiers.mover.load

        def fails_late(layer, *rest):
            if layer == 2:
                raise OSError("bus error")
            return load(layer, *rest)

        monkeypatch.setattr(engine._tiers.mover, "load", fails_late)
        second, mate = serve(engine, request(ids), request(other, 20))
        stats = engine.snapshot()
    assert second.ids == first.ids
    assert mate.ids == expected
    assert stats.tiers.failures["copy"] == 1
    assert stats.failed == 0
    assert stats.hit_tokens == stats.host_hit_tokens == 0


def slow_load(engine: Engine, monkeypatch) -> threading.Event:
    """Copies into the pool wait until the event is set."""
    release = threading.Event()
    load = engine._tiers.mover.load

    def waits(*arguments):
        assert release.wait(20)
        return load(*arguments)

    monkeypatch.setattr(engine._tiers.mover, "load", waits)
    return release


def test_abort_during_a_load_keeps_the_pages_until_it_ends(tiny, monkeypatch) -> None:
    """They are neither handed out before, nor lost. (A33)"""
    ids = prompt(330)
    with tiered(tiny, max_batch_size=2) as engine:
        serve(engine, request(ids))
        forget_pool(engine)
        release = slow_load(engine, monkeypatch)
        running_one = engine.submit(request(prompt(20, seed=9), 100))
        engine.step()
        arriving = engine.submit(request(ids))
        engine.step()
        assert engine.snapshot().batch_size == 2
        arriving.close()
        engine.step()
        engine.check_integrity()
        stats = engine.snapshot()
        assert (stats.aborted, stats.batch_size, stats.pages_loading) == (1, 1, 5)
        release.set()
        assert engine._tiers.settle(10)
        assert engine.snapshot().pages_loading == 0
        run_steps(engine)
        assert isinstance(collect(running_one).last, RequestDone)
        assert engine.snapshot().tiers.cancelled_fetches == 1


def test_others_decode_while_pages_arrive(tiny, monkeypatch) -> None:
    """A request whose copies are slow does not hold up its batch."""
    ids = prompt(330)
    with tiered(tiny, max_batch_size=4) as engine:
        (first,) = serve(engine, request(ids))
        forget_pool(engine)
        release = slow_load(engine, monkeypatch)
        decoding = engine.submit(request(prompt(20, seed=9), 30))
        engine.step()
        arriving = engine.submit(request(ids))
        for _ in range(10):
            engine.step()
        assert engine.snapshot().generated_tokens == first.done.usage.generated_tokens + 11
        release.set()
        run_steps(engine)
        assert collect(arriving).ids == first.ids
        assert len(collect(decoding).ids) == 30


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


def test_damaged_tag_is_computed_anew_and_heals(tiny) -> None:
    """A page in the index that was never finished, or holds something else."""
    ids = prompt(330)
    with tiered(tiny) as engine:
        (first,) = serve(engine, request(ids))
        manager = engine._scheduler.manager
        engine._tiers.flush()
        seq = manager.acquire(ids)
        bad = seq.page_ids[2]
        manager.release(seq)
        for tag in (None, b"of another prompt"):
            manager.tags.clear([bad])
            if tag is not None:
                manager.tags.write([bad], [tag])
            for layer in engine._runner.pool.layers:
                layer.pages[bad] = torch.nan
            (second,) = serve(engine, request(ids))
            assert second.ids == first.ids
            assert second.done.usage.cached_tokens == 128
            (third,) = serve(engine, request(ids))
            assert third.done.usage.cached_tokens >= 320
            seq = manager.acquire(ids)
            bad = seq.page_ids[2]
            manager.release(seq)
        assert engine.snapshot().tag_mismatches == 2


def test_failed_step_leaves_no_tag(tiny, monkeypatch) -> None:
    """Half-written pages are not cached, in no tier."""
    ids = prompt(330)
    with tiered(tiny) as engine:
        attend = engine._runner._cache.attend

        def fails(rows, *rest, **options):
            if rows.layer_idx == 1:
                raise RuntimeError("device lost")
            return attend(rows, *rest, **options)

        with monkeypatch.context() as patch:
            patch.setattr(engine._runner._cache, "attend", fails)
            serve(engine, request(ids))
        assert engine.snapshot().failed == 1
        engine._tiers.settle(10)
        assert len(engine._scheduler.manager.tags) == 0
        assert engine.snapshot().tiers.host_pages == 0
        (second,) = serve(engine, request(ids))
    assert second.done.usage.cached_tokens == 0
    assert second.ids == cold(tiny, request(ids))


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
