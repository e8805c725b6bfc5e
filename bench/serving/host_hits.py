"""Time to first token of a prompt whose prefix lies in host memory, against computing it.

The pool holds one such prompt, so that prompts with different prefixes put each other out of it and
each comes back from the host. Turns alternate with an engine that has no index and computes the
same prompts. The rate that copies could reach is that of one large copy from page-locked memory,
measured in the same run.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch

from bench.serving.load import random_prompt, submit, timed
from bicl.frontends.http.engine import Engine

__all__ = ["host_rows", "host_to_device_rate"]

PREFIXES = 2
COPY_BYTES = 1 << 30


def host_rows(
    engine: Engine, plain: Engine, *, prefix: int, suffix: int, rounds: int
) -> list[dict[str, Any]]:
    """``engine``: with a host tier and a pool for one prompt; ``plain``: without reuse."""
    assert engine._tiers is not None
    rng = np.random.default_rng(17)
    size = engine.loaded.vocab_size
    prefixes = [random_prompt(rng, prefix, size) for _ in range(PREFIXES)]
    for each in prefixes:
        _first_token(engine, each + random_prompt(rng, suffix, size))
        assert engine._tiers.settle(60)
    _first_token(plain, random_prompt(rng, prefix + suffix, size))
    hits, cold, rates, exposed = [], [], [], []
    for number in range(rounds + 1):
        prompt = prefixes[number % PREFIXES] + random_prompt(rng, suffix, size)
        before = _moved(engine)
        hit, cached = _first_token(engine, prompt)
        assert cached == prefix, f"{cached} of {prefix} tokens came from the host"
        engine._tiers.settle(60)
        after = _moved(engine)
        miss, _ = _first_token(plain, prompt)
        if number:  # the first round warms up
            hits.append(hit)
            cold.append(miss)
            rates.append((after[0] - before[0]) / (after[1] - before[1]))
            exposed.append(after[2] - before[2])
    peak = host_to_device_rate(engine.loaded.device)
    seconds, rate = statistics.median(hits), statistics.median(rates)
    shape = f"{prefix}+{suffix} tokens"
    return [
        {
            "case": "host hit, first token",
            "value": statistics.median(c / h for c, h in zip(cold, hits, strict=True)),
            "unit": "x faster than computing",
            "shape": shape,
            "hit_ms": round(1000 * seconds, 2),
            "computed_ms": round(1000 * statistics.median(cold), 2),
            "exposed_ms": round(1000 * statistics.median(exposed), 2),
            "bytes": engine._tiers.costs.page_bytes * prefix // engine.config.page_size,
        },
        {
            "case": "host hit, bandwidth",
            "value": rate / peak,
            "unit": "of the measured host-to-device rate",
            "shape": shape,
            "gigabytes_per_second": round(rate / 1e9, 2),
            "host_to_device_gigabytes_per_second": round(peak / 1e9, 2),
        },
    ]


def host_to_device_rate(device: torch.device, rounds: int = 5) -> float:
    """Bytes a second of one large copy from page-locked memory; best of a few."""
    pinned = device.type == "cuda"
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=pinned)
    target = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(rounds):
        _synchronize(device)
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        _synchronize(device)
        seconds.append(time.perf_counter() - began)
    return COPY_BYTES / min(seconds)


def _first_token(engine: Engine, prompt: tuple[int, ...]) -> tuple[float, int]:
    """Seconds to the first token, and tokens that came from the host."""
    began = time.perf_counter()
    first, done = timed(submit(engine, prompt, 1))
    return first - began, done.usage.cached_host_tokens


def _moved(engine: Engine) -> tuple[int, float, float]:
    """Bytes that came from the host, the seconds of their copies, and those that were waited."""
    assert engine._tiers is not None
    stats = engine._tiers.stats()
    return stats.loaded_bytes, stats.hidden_seconds + stats.exposed_seconds, stats.exposed_seconds


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
