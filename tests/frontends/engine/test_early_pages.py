"""Pages found while the device computes: for rows that grow, and for those who come next."""

from __future__ import annotations

from support.driving import collect, generate, request, run_steps, running, stepped
from support.driving import random_prompt as prompt


def solo(loaded, one):
    with running(loaded, prefix_caching=False) as engine:
        return generate(engine, one)[0].ids


def waiting_behind(engine, *prompts: list[int]):
    """Streams of requests that come while a step is all of another one's prompt, which has run."""
    streams = [engine.submit(request(prompt(200, seed=50)))]
    streams += [engine.submit(request(each)) for each in prompts]
    assert engine.step()
    return streams, list(engine._scheduler.waiting)


def test_pages_are_found_while_the_step_before_runs(tiny, monkeypatch) -> None:
    """The next plan looks nothing up."""
    engine = stepped(tiny, max_batch_prefill_tokens=200)
    streams, (second, third) = waiting_behind(engine, prompt(200), prompt(150, seed=1))
    assert len(second.pages.page_ids) == 4
    assert third.pages is None  # it begins a step later
    with monkeypatch.context() as patch:
        patch.setattr(engine._scheduler.manager, "acquire", None)
        plan = engine._scheduler.plan()
    assert [chunk.sequence for chunk in plan.chunks[1:]] == [second]
    for stream in streams:
        stream.close()


def test_the_next_page_of_a_row_is_there_before_its_token(tiny, monkeypatch) -> None:
    """But none for a last token, which is never computed."""
    engine = stepped(tiny)
    streams = [engine.submit(request(prompt(64, seed=1), 2)), engine.submit(request(prompt(64), 1))]
    sequences = list(engine._arrivals)
    held, emit = [], engine._emitter.emit

    def look(ready):
        held.extend(len(sequence.pages.page_ids) for sequence in sequences)
        return emit(ready)

    with monkeypatch.context() as patch:
        patch.setattr(engine._emitter, "emit", look)
        engine.step()
    assert held == [2, 1]
    run_steps(engine)
    assert [len(collect(stream).ids) for stream in streams] == [2, 1]


def test_equal_prompts_that_wait_hold_pages_once(tiny) -> None:
    engine = stepped(tiny, max_batch_prefill_tokens=200)
    streams, (second, third) = waiting_behind(engine, prompt(90), prompt(90))
    assert second.pages is not None
    assert third.pages is None
    run_steps(engine)
    assert len({tuple(collect(stream).ids) for stream in streams[1:]}) == 1
    assert engine.snapshot().prefilled_tokens == 200 + 90 + 90 - 64


def test_who_waits_takes_no_page_that_a_running_row_may_need(tiny) -> None:
    """Six pages: four run, two are free, and one of these is the running row's."""
    engine = stepped(tiny, max_batch_prefill_tokens=200, num_pages=6, max_total_tokens=384)
    streams, (second,) = waiting_behind(engine, prompt(100))
    assert second.pages is None
    run_steps(engine)
    assert engine.snapshot().preemptions == 0
    assert collect(streams[1]).ids == solo(tiny, request(prompt(100)))


def test_flush_takes_the_pages_of_who_waits(tiny) -> None:
    """Its prefix was found while the step before ran, and then the weights changed."""
    engine = stepped(tiny, max_batch_prefill_tokens=200)
    first = engine.submit(request(prompt(150)))
    run_steps(engine)
    assert collect(first).done.usage.cached_tokens == 0
    streams, (second,) = waiting_behind(engine, prompt(150))
    assert second.pages.num_cached_tokens >= 128
    engine.flush_cache()
    assert second.pages is None
    run_steps(engine)
    assert collect(streams[1]).done.usage.cached_tokens == 0
    engine.check_integrity()
