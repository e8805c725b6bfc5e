"""Driving engines whose pages go to host memory and disk and come back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from support.driving import collect, generate, run_steps, running, stepped
from support.driving import random_prompt as prompt

from bicl.frontends.http.engine import Engine

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


def slow_load(engine: Engine, monkeypatch) -> tuple[threading.Event, threading.Event]:
    """Copies into the pool wait until the second event is set; the first tells that one waits."""
    begun, release = threading.Event(), threading.Event()
    load = engine._tiers.mover.load

    def waits(*arguments):
        begun.set()
        assert release.wait(20)
        return load(*arguments)

    monkeypatch.setattr(engine._tiers.mover, "load", waits)
    return begun, release
