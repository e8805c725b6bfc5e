"""Copies that end at an awkward moment of the schedule."""

from __future__ import annotations

import time

from support.driving import collect, generate, request, run_steps, running, stepped
from support.tiny_models import tiny_loaded


def test_pages_that_come_right_after_their_admission() -> None:
    """Pages are on their way when their request is admitted and there when the step's rows are
    chosen. The request must not lose its admission, or its row keeps the page table of whoever
    had the row before."""
    loaded = tiny_loaded("llama")
    first, second = [list(range(start, start + 150)) for start in (4, 100)]
    with running(loaded, prefix_caching=False) as plain:
        (truth,) = generate(plain, request(second))
    engine = stepped(loaded, num_pages=3, host_cache_bytes=16 << 20)
    try:
        for prompt in (second, first):  # the pool holds one: the second comes from the host
            stream = engine.submit(request(prompt))
            run_steps(engine)
            collect(stream)
            assert engine._tiers.settle(10)
        scheduler, load = engine._scheduler, engine._tiers.mover.load
        admit = scheduler._admit
        engine._tiers.costs.prefill_tokens_per_second = 0.0  # fetch whatever it costs

        def slow_load(*args):
            time.sleep(0.02)
            return load(*args)

        def admit_and_wait(*args):
            admitted = admit(*args)
            for sequence in admitted:
                assert sequence.is_arriving
                assert sequence.fetch.wait(10)
            return admitted

        engine._tiers.mover.load, scheduler._admit = slow_load, admit_and_wait
        stream = engine.submit(request(second))
        run_steps(engine)
        result = collect(stream)
        assert result.done.usage.cached_host_tokens == 128
        assert result.ids == truth.ids
    finally:
        engine.stop()
