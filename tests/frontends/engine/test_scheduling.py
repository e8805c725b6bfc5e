"""Chunks, prefixes, pages and who gives way: a tiny model, stepped by hand where order matters."""

from __future__ import annotations

import time

import pytest
from support.driving import collect, generate, request, run_steps, running, stepped
from support.driving import random_prompt as prompt

from bicl.errors import CapacityError, InvalidInputError, OverloadedError
from bicl.frontends.http.engine import engine as engine_module
from bicl.frontends.http.request import RequestDone, RequestFailed


def solo(loaded, one, **config):
    with running(loaded, prefix_caching=False, **config) as engine:
        return generate(engine, one)[0].ids


@pytest.mark.parametrize("chunk", [1, 50, 64, 100])
def test_unaligned_chunks_give_the_same_tokens(tiny, chunk: int) -> None:
    """(A21)"""
    ids = prompt(230)
    expected = solo(tiny, request(ids))
    with running(tiny, max_batch_prefill_tokens=chunk) as engine:
        assert generate(engine, request(ids))[0].ids == expected


def test_chunked_prefill_after_a_prefix_hit(tiny) -> None:
    """330 tokens whose first 192 hit, in chunks of 100. (A21)"""
    shared = prompt(192)
    ids = shared + prompt(138, seed=1)
    expected = solo(tiny, request(ids))
    with running(tiny, max_batch_prefill_tokens=100) as engine:
        generate(engine, request([*shared, 5], 1))
        (result,) = generate(engine, request(ids))
    assert result.ids == expected
    assert result.done.usage.cached_tokens == 192


def test_different_suffix_after_a_shared_prefix(tiny) -> None:
    """(A2)"""
    first, second = prompt(192), prompt(128) + prompt(64, seed=3)
    expected = solo(tiny, request(second))
    with running(tiny) as engine:
        generate(engine, request(first))
        (result,) = generate(engine, request(second))
    assert result.ids == expected
    assert result.done.usage.cached_tokens >= 128


@pytest.mark.parametrize("length", [64, 128, 192])
def test_fully_cached_prompt_computes_its_last_token(tiny, length: int) -> None:
    """(A6)"""
    ids = prompt(length)
    with running(tiny) as engine:
        results = [generate(engine, request(ids))[0] for _ in range(3)]
        (longer,) = generate(engine, request(ids + prompt(64, seed=7)))
    assert results[1].ids == results[0].ids == results[2].ids
    assert 0 < results[1].done.usage.cached_tokens < length
    assert longer.done.usage.cached_tokens >= length


@pytest.mark.parametrize(
    ("shared", "least"), [(63, 63), (64, 64), (127, 127), (130, 128), (150, 150)]
)
def test_shared_prefix_is_reused_to_the_token(tiny, shared: int, least: int) -> None:
    """Whole pages by reference, the rest of the last one by copy if that is worth it. (A74)"""
    ids = prompt(shared)
    with running(tiny) as engine:
        generate(engine, request([*ids, 9], 1))
        (result,) = generate(engine, request([*ids, 10, 11, 12]))
    assert result.done.usage.cached_tokens == least
    assert result.ids == solo(tiny, request([*ids, 10, 11, 12]))


def test_answers_are_cached_for_the_next_turn(tiny) -> None:
    """(A75)"""
    ids = prompt(100)
    with running(tiny) as engine:
        (first,) = generate(engine, request(ids, 50))
        (second,) = generate(engine, request(ids + first.ids + prompt(50, seed=2)))
    assert second.done.usage.cached_tokens >= 128


@pytest.mark.parametrize("other", [{"salt": "b"}, {"adapter_id": "b"}, {}])
def test_tenants_and_adapters_share_nothing(tiny, other: dict) -> None:
    """(A11, A16)"""
    ids = prompt(130)
    with running(tiny) as engine:
        first = generate(engine, request(ids, salt="a"))[0]
        again = generate(engine, request(ids, salt="a"))[0]
        foreign = generate(engine, request(ids, **other))[0]
    cached = [r.done.usage.cached_tokens for r in (first, again, foreign)]
    assert cached[0] == cached[2] == 0 < cached[1]
    assert first.ids == again.ids == foreign.ids


def test_flush_forgets_everything(tiny) -> None:
    """(A18)"""
    ids = prompt(192)
    with running(tiny) as engine:
        generate(engine, request(ids))
        report = engine.flush_cache()
        assert report.freed_pages >= 3
        assert generate(engine, request(ids))[0].done.usage.cached_tokens == 0


def test_equal_prompts_are_computed_once(tiny) -> None:
    """15 of 16 wait for the first one's pages instead of computing them again."""
    ids = prompt(200)
    engine = stepped(tiny, max_batch_size=16)
    streams = [engine.submit(request(ids)) for _ in range(16)]
    run_steps(engine)
    results = [collect(stream) for stream in streams]
    assert len({tuple(result.ids) for result in results}) == 1
    assert engine.snapshot().prefilled_tokens <= 200 + 15 * (200 - 192)
    assert [r.done.usage.cached_tokens >= 192 for r in results] == [False] + 15 * [True]


def test_one_new_token_needs_one_step_and_leaves_nothing(tiny) -> None:
    """Ends during prefill, beside a running decode. (A27)"""
    with running(tiny, max_total_tokens=512) as engine:
        long = engine.submit(request(prompt(20, seed=99), 200))
        results = generate(engine, *[request(prompt(65, seed=s), 1) for s in range(50)])
        engine.abort(long.request_id)
        collect(long)
    assert all(len(result.ids) == 1 for result in results)


def test_chunks_beside_decodes_return_every_page(tiny) -> None:
    """(A26)"""
    with running(tiny, max_batch_prefill_tokens=128, prefix_caching=False) as engine:
        before = engine.snapshot().pages_free
        generate(
            engine,
            *[request(prompt(10, seed=s), 40) for s in range(3)],
            request(prompt(300, seed=9)),
        )
        assert engine.snapshot().pages_free == before


def test_sequential_requests_leak_no_page(tiny) -> None:
    """(A25)"""
    with running(tiny, prefix_caching=False) as engine:
        before = engine.snapshot().pages_free
        for seed in range(200):
            generate(engine, request(prompt(70, seed=seed), 5))
        assert engine.snapshot().pages_free == before


def test_eviction_and_preemption_give_solo_outputs(tiny) -> None:
    """A pool of 8 pages, requests of 130 tokens that share 64. (A19, A71)"""
    requests = [request(prompt(64) + prompt(66, seed=s), 20) for s in range(6)]
    expected = [solo(tiny, one) for one in requests]
    with running(tiny, num_pages=8, max_batch_size=4, max_total_tokens=256) as engine:
        for _ in range(5):
            results = generate(engine, *[request(one.prompt_ids, 20) for one in requests])
            assert [result.ids for result in results] == expected
        assert engine.snapshot().evicted_pages > 0


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "seed": 5, "temperature": 1.3}])
def test_preempted_request_repeats_its_draws(tiny, sampling: dict) -> None:
    """Random prompts, so its own pages must not count as hits. (A19, A71)"""
    requests = [request(prompt(60, seed=s), 120, **sampling) for s in range(4)]
    expected = [solo(tiny, one) for one in requests]
    with running(tiny, num_pages=6, max_batch_size=4, max_total_tokens=256) as engine:
        results = generate(engine, *requests)
        stats = engine.snapshot()
    assert [result.ids for result in results] == expected
    assert stats.preemptions > 0
    assert sum(r.done.usage.num_preemptions for r in results) == stats.preemptions
    assert stats.hit_tokens == 0


def test_request_that_can_never_fit_is_refused_at_once(tiny) -> None:
    """It must not block those behind it. (A34, A62)"""
    with running(tiny, num_pages=4, max_total_tokens=2048) as engine:
        with pytest.raises(CapacityError, match="cache has 4"):
            engine.submit(request(prompt(250), 8))
        assert len(generate(engine, request(prompt(250), 7))[0].ids) == 7  # exactly 256 stored
        with pytest.raises(CapacityError, match="max_total_tokens"):
            engine.submit(request(prompt(2000), 49))


def test_bad_requests_change_nothing(tiny) -> None:
    with running(tiny) as engine:
        for bad in (request([], 1), request([1], 0), request([260], 1), request([-1], 1)):
            with pytest.raises(InvalidInputError):
                engine.submit(bad)
        one = request(prompt(5))
        stream = engine.submit(one)
        with pytest.raises(InvalidInputError, match="in use"):
            engine.submit(one)
        collect(stream)


def test_waiting_limit(tiny) -> None:
    engine = stepped(tiny, max_batch_size=1, max_waiting=2)
    streams = [engine.submit(request(prompt(5))) for _ in range(2)]
    with pytest.raises(OverloadedError, match="2 requests wait"):
        engine.submit(request(prompt(5)))
    engine.step()  # one of them runs now
    streams.append(engine.submit(request(prompt(5))))
    run_steps(engine)
    assert all(isinstance(collect(stream).last, RequestDone) for stream in streams)


def test_first_come_first_served(tiny) -> None:
    """A long prompt is not overtaken for ever by short ones."""
    engine = stepped(tiny, num_pages=6, max_batch_size=8, max_total_tokens=384)
    first = engine.submit(request(prompt(120, seed=1), 100))
    engine.step()
    long = engine.submit(request(prompt(300, seed=2), 2))
    short = [engine.submit(request(prompt(10, seed=3 + s), 2)) for s in range(5)]
    while engine.snapshot().finished == 0:
        assert engine.snapshot().batch_size == 1  # the short ones do not overtake
        engine.step()
    run_steps(engine)
    assert all(collect(stream).done for stream in (first, long, *short))


def test_abort_in_queue_prefill_and_decode_frees_pages(tiny) -> None:
    """(A28, A30, A31)"""
    shared = prompt(130)
    engine = stepped(tiny, max_batch_size=2, max_batch_prefill_tokens=64)
    decoding = engine.submit(request([*shared, 5], 300))
    for _ in range(5):
        engine.step()
    prefilling = engine.submit(request(prompt(200, seed=4), 300))
    engine.step()
    queued = engine.submit(request([*shared, 6], 300))
    engine.step()
    assert engine.snapshot().batch_size == 2
    assert engine.snapshot().queue_size == 1
    for stream in (queued, prefilling, decoding):
        stream.close()
        engine.step()
        engine.step()
        engine.check_integrity()
    stats = engine.snapshot()
    assert (stats.aborted, stats.batch_size, stats.queue_size, stats.pages_in_use) == (3, 0, 0, 0)
    assert isinstance(collect_rest(decoding), RequestFailed)


def test_pinned_prefix_survives_what_evicts_all_others(tiny) -> None:
    ids, other = prompt(130, seed=1), prompt(130, seed=2)
    with running(tiny, num_pages=16) as engine:
        for one in (ids, other):
            generate(engine, request(one, 2))
        assert engine.pin(ids) == 128
        for seed in range(3, 12):
            generate(engine, request(prompt(300, seed=seed), 2))
        kept, gone = (generate(engine, request(one, 2))[0].done.usage for one in (ids, other))
        assert (kept.cached_tokens, gone.cached_tokens) == (128, 0)
        assert engine.unpin(ids)
        assert not engine.unpin(ids)


def test_bookkeeping_that_contradicts_itself_is_begun_anew_and_serving_goes_on(
    tiny, caplog, monkeypatch
) -> None:
    """(A23)"""
    monkeypatch.setattr(engine_module, "IDLE_SECONDS", 0.01)
    ids = prompt(150)
    with running(tiny) as engine:
        first = generate(engine, request(ids))[0].ids
        manager = engine._scheduler.manager
        with engine._lock:
            manager._index.num_pages += 1
        generate(engine, request(prompt(3, seed=9)))  # a pause is checked once
        deadline = time.monotonic() + 20
        while not manager.stats.rebuilds and time.monotonic() < deadline:
            time.sleep(0.01)
        assert manager.stats.rebuilds == 1
        assert "begun anew" in caplog.text
        assert generate(engine, request(ids))[0].ids == first
        assert engine.snapshot().pages_in_use == 0
        engine.check_integrity()


def collect_rest(stream):
    stream._ended = False  # close() ends iteration; look at what is left
    *_, last = stream
    return last


def test_failed_step_fails_its_batch_only(tiny, monkeypatch) -> None:
    """All pages come back and the engine goes on."""
    ids = prompt(70)
    with running(tiny) as engine:
        before = generate(engine, request(ids))[0].ids
        forward = engine._runner.forward
        calls = iter([True, False])

        def fails_once(chunks, **options):
            if next(calls, False):
                raise RuntimeError("device lost")
            return forward(chunks, **options)

        monkeypatch.setattr(engine._runner, "forward", fails_once)
        (failed,) = generate(engine, request(prompt(70, seed=3)))
        assert isinstance(failed.last, RequestFailed)
        assert "device lost" in str(failed.last.error)
        assert generate(engine, request(ids))[0].ids == before
        assert engine.snapshot().failed == 1


def test_engine_stops_when_every_step_fails(tiny, monkeypatch) -> None:
    engine = stepped(tiny).start()

    def fails(chunks, **options):
        raise RuntimeError("device lost")

    monkeypatch.setattr(engine._runner, "forward", fails)
    for _ in range(3):
        (failed,) = generate(engine, request(prompt(5)))
        assert isinstance(failed.last, RequestFailed)
    engine._thread.join(10)
    assert not engine.snapshot().healthy
    with pytest.raises(OverloadedError):
        engine.submit(request(prompt(5)))


def test_drain_finishes_what_runs_and_refuses_the_rest(tiny) -> None:
    """(A67)"""
    engine = stepped(tiny).start()
    stream = engine.submit(request(prompt(20), 50))
    assert engine.drain(30)
    with pytest.raises(OverloadedError):
        engine.submit(request(prompt(5)))
    assert len(collect(stream).ids) == 50
    engine.stop()


def test_stop_fails_what_is_left(tiny) -> None:
    engine = stepped(tiny, max_batch_size=1).start()
    streams = [engine.submit(request(prompt(20), 400)) for _ in range(3)]
    assert not engine.drain(0)
    engine.stop()
    engine.stop()
    assert all(isinstance(collect(stream).last, RequestFailed) for stream in streams)


def test_streams_are_async_iterables(tiny) -> None:
    import asyncio

    async def consume(stream):
        return [event async for event in stream]

    async def all_at_once(engine):
        streams = [engine.submit(request(prompt(9, seed=s), 6)) for s in range(4)]
        return await asyncio.gather(*map(consume, streams))

    with running(tiny) as engine:
        events = asyncio.run(all_at_once(engine))
    assert [len(e) for e in events] == [7, 7, 7, 7]
    assert [e[-2].last for e in events] == [True] * 4
    assert not any(e[0].last for e in events)
