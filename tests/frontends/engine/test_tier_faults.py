"""What goes wrong between the pool and its tiers costs time, never a wrong token. (A40)"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from support.driving import collect, request, run_steps
from support.driving import random_prompt as prompt
from support.tiered import cold, forget_pool, serve, slow_load, tiered

from bicl.cache.keys import Namespace, pack_ids
from bicl.frontends.http.request import RequestDone


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


def test_abort_during_a_load_keeps_the_pages_until_it_ends(tiny, monkeypatch) -> None:
    """They are neither handed out before, nor lost. (A33)"""
    ids = prompt(330)
    with tiered(tiny, max_batch_size=2) as engine:
        serve(engine, request(ids))
        forget_pool(engine)
        begun, release = slow_load(engine, monkeypatch)
        running_one = engine.submit(request(prompt(20, seed=9), 100))
        engine.step()
        arriving = engine.submit(request(ids))
        engine.step()
        assert engine.snapshot().batch_size == 2
        assert begun.wait(20)
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
        _, release = slow_load(engine, monkeypatch)
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
