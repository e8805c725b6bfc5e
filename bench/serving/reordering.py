"""Exposed reordering: the share of a step that writing tiles costs and nothing hides.

* **traffic**: requests of chat-shaped lengths come at a fixed rate, whatever the engine answers.
  While they come, each step has prompt tokens of some; when they stop and all prompts are computed,
  those that still run decode, and that is watched, too.
  CUPTI records every kernel. A store kernel is exposed while no other kernel runs;
  ``store_kernels`` counts all of its time, hidden or not, and is the most that it could be.
  ``host_share`` is what the host spends in ``backend.store``. ``by_the_engines_clock`` is what the
  server's own metric says (:mod:`bicl.attention.store_clock`).
* **decode**, **prefill**: one step captured in a CUDA graph with and without its store, in turns
  (:mod:`bench.serving.steps`), and the timeline of its kernels as above (``timeline``).
* **side stream**: the same steps with their stores forked to a stream of their own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from bench.serving.load import CHAT, finish, open_loop, submit
from bench.serving.steps import (
    Exposed,
    Run,
    StepShape,
    exposed,
    step_pair,
    store_on_side_stream,
)
from bicl.frontends.http.engine import Engine, EngineStats

__all__ = ["decode_rows", "exposed_ns", "prefill_rows", "side_stream_rows", "traffic_rows"]

Rows = list[dict[str, Any]]

DECODE_STEPS = 40
"""Watched after the last request came."""

TAIL_SECONDS = 8.0
"""For these steps, at most: prompts that still wait must be computed first."""

STORE_KERNEL = "store_kv_kernel"


@dataclass
class _Watch:
    """Steps as ``(begin, end, is decode)`` in ns since the epoch; seconds spent in ``store``."""

    steps: list[tuple[int, int, bool]]
    store_seconds: float = 0.0


def traffic_rows(engine: Engine, *, rate: float, seconds: float, shrink: float) -> Rows:
    """Rows for all steps, and for those with and without prompt tokens."""
    finish(submit(engine, range(4, 68), 4))
    before = engine.snapshot()
    with _watched(engine) as watch, _kernels(engine) as kernels:
        began = time.perf_counter()
        streams = open_loop(engine, CHAT.shrunk(shrink), rate, seconds)
        elapsed = time.perf_counter() - began
        after = engine.snapshot()
        _let_decode(engine)
    for stream in streams:
        stream.close()
    while engine.snapshot().batch_size or engine.snapshot().queue_size:
        time.sleep(0.02)
    load = {
        "offered_per_second": round(len(streams) / elapsed, 1),
        "finished_per_second": round((after.finished - before.finished) / elapsed, 1),
        "waiting_at_end": after.queue_size,
        "running_at_end": after.batch_size,
        "prompt_tokens_per_second": round(
            (after.prefilled_tokens - before.prefilled_tokens) / elapsed
        ),
        "new_tokens_per_second": round(
            (after.generated_tokens - before.generated_tokens) / elapsed
        ),
        "lengths_divided_by": shrink,
    }
    kinds = {"all": (True, False), "prefill": (False,), "decode": (True,)}
    rows = []
    for kind, wanted in kinds.items():
        steps = [(a, b) for a, b, is_decode in watch.steps if is_decode in wanted]
        share = _share(steps, kernels) if steps else {"steps": 0}  # a row without value: not seen
        rows.append({"case": f"exposed reordering, {kind}", **share, **load})
    total = sum(b - a for a, b, _ in watch.steps)
    rows[0]["host_share"] = watch.store_seconds * 1e9 / total
    rows[0]["by_the_engines_clock"] = (_store_time(after) - _store_time(before)) / (total / 1e9)
    return rows


def _let_decode(engine: Engine) -> None:
    """Return when some steps had no prompt tokens, or there will be none."""
    deadline, first = time.perf_counter() + TAIL_SECONDS, engine.snapshot().decode_steps
    while time.perf_counter() < deadline:
        stats = engine.snapshot()
        if stats.decode_steps >= first + DECODE_STEPS or not stats.batch_size + stats.queue_size:
            return
        time.sleep(0.02)


def _store_time(stats: EngineStats) -> float:
    return stats.prefill_store_time + stats.decode_store_time


def decode_rows(
    engine: Engine, shapes: Sequence[tuple[int, int]], *, rounds: int, replays: int = 8
) -> Rows:
    """``shapes``: batch and context. Decode steps replayed from a graph, as the engine does."""
    rows = []
    for batch, context in shapes:
        shape = StepShape((1,) * batch, (context - 1,) * batch)
        pair = step_pair(engine._runner, shape)
        found = exposed(pair, engine.loaded.device, rounds=rounds)
        timeline = _timeline(engine, pair[0], replays)
        rows.append(
            {
                "case": "exposed reordering in a decode step",
                "shape": f"{batch}x{context}",
                "batch": batch,
                # A step's time wanders by more than its stores take: the timeline is exact.
                "value": timeline.get("timeline", found.share),
                "by_pairs": found.share,
                **_difference(found, rounds),
                **timeline,
            }
        )
    return rows


def prefill_rows(engine: Engine, shapes: Sequence[tuple[int, int]], *, rounds: int) -> Rows:
    """Speed of a prefill against one that writes nothing. ``shapes``: sequences, tokens of each."""
    rows = []
    for batch, tokens in shapes:
        pair = step_pair(engine._runner, StepShape((tokens,) * batch, (0,) * batch))
        found = exposed(pair, engine.loaded.device, rounds=rounds)
        rows.append(
            {
                "case": "prefill with reordering",
                "shape": f"{batch}x{tokens}",
                "value": 1 - found.share,
                **_difference(found, rounds),
                "unit": "x",
                **_timeline(engine, pair[0], 1),
            }
        )
    return rows


def side_stream_rows(engine: Engine, shapes: Sequence[StepShape], *, rounds: int) -> Rows:
    """Speed of steps whose stores run on a side stream, against steps as they are."""
    rows = []
    for shape in shapes:
        pair = step_pair(engine._runner, shape, store_on_side_stream)
        found = exposed(pair, engine.loaded.device, rounds=rounds)
        aside_us = found.step_us - found.store_us
        rows.append(
            {
                "case": "stores on a side stream",
                "shape": f"{len(shape.counts)}x{shape.counts[0] + shape.starts[0]}, "
                f"{sum(shape.counts)} tokens computed",
                "value": found.step_us / aside_us,
                "unit": "x the speed of stores in line",
                "interval": [
                    found.step_us / (found.step_us - us) for us in (found.low_us, found.high_us)
                ],
                "step_us": round(found.step_us, 1),
                "aside_us": round(aside_us, 1),
                "pairs": rounds,
            }
        )
    return rows


def _difference(found: Exposed, rounds: int) -> dict[str, Any]:
    return {
        "unit": "of step time",
        "store_share_interval": [found.low_us / found.step_us, found.high_us / found.step_us],
        "step_us": round(found.step_us, 1),
        "store_us": round(found.store_us, 1),
        "pairs": rounds,
    }


def _timeline(engine: Engine, run: Run, replays: int) -> dict[str, Any]:
    """The same from the kernels' own begins and ends; nothing where there is no GPU."""
    with _kernels(engine) as kernels:
        for _ in range(replays):
            run()
    stores = [(begin, end) for begin, end, is_store in kernels if is_store]
    others = [(begin, end) for begin, end, is_store in kernels if not is_store]
    if not stores:
        return {}
    total = max(end for _, end, _ in kernels) - kernels[0][0]
    return {
        "timeline": exposed_ns(stores, others) / total,
        "store_kernels": sum(end - begin for begin, end in stores) / total,
        "stores_seen": len(stores),
    }


@contextmanager
def _watched(engine: Engine) -> Iterator[_Watch]:
    """Note when the engine steps, and how long its host stores."""
    watch = _Watch([])
    runner = engine._runner
    step, forward, store = engine.step, runner.forward, runner.backend.store
    kinds: list[bool] = []

    def timed_step() -> bool:
        kinds.clear()
        began = time.time_ns()
        more = step()
        if kinds:
            watch.steps.append((began, time.time_ns(), kinds[0]))
        return more

    def noted_forward(chunks: Any, *args: Any, **options: Any) -> torch.Tensor:
        kinds.append(all(chunk.count == 1 for chunk in chunks))
        return forward(chunks, *args, **options)

    def timed_store(*args: Any, **options: Any) -> None:
        began = time.perf_counter()
        store(*args, **options)
        watch.store_seconds += time.perf_counter() - began

    engine.step, runner.forward = timed_step, noted_forward  # type: ignore[method-assign]
    runner.backend.store = timed_store  # type: ignore[method-assign]
    try:
        yield watch
    finally:
        del engine.step, runner.forward, runner.backend.store


@contextmanager
def _kernels(engine: Engine) -> Iterator[list[tuple[int, int, bool]]]:
    """Kernels that ran: ``(begin, end, is a store)`` in ns since the epoch. Filled at the end."""
    found: list[tuple[int, int, bool]] = []
    if engine.loaded.device.type == "cpu":
        yield found
        return
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        yield found
        torch.cuda.synchronize()
    for event in profiler.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            begin = event.start_ns()
            found.append((begin, begin + event.duration_ns(), STORE_KERNEL in event.name()))
    found.sort()


def _share(
    steps: Sequence[tuple[int, int]], kernels: Sequence[tuple[int, int, bool]]
) -> dict[str, Any]:
    """What of the steps' time is the store's."""
    total = sum(end - begin for begin, end in steps)
    begins = np.array([begin for begin, _ in steps])
    ends = np.array([end for _, end in steps])
    inside = [k for k in kernels if _covers(begins, ends, k[0])]
    stores = [(begin, end) for begin, end, is_store in inside if is_store]
    others = [(begin, end) for begin, end, is_store in inside if not is_store]
    return {
        "value": exposed_ns(stores, others) / total,
        "unit": "of step time",
        "store_kernels": sum(end - begin for begin, end in stores) / total,
        "kernels_seen": len(inside),
        "stores_seen": len(stores),
        "steps": len(steps),
        "ms_per_step": round(total / len(steps) / 1e6, 2),
        "gpu_busy": sum(end - begin for begin, end in others + stores) / total,
    }


def _covers(begins: np.ndarray, ends: np.ndarray, at: int) -> bool:
    index = int(np.searchsorted(begins, at, side="right")) - 1
    return index >= 0 and at < ends[index]


def exposed_ns(stores: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]]) -> int:
    """Time in ``stores`` during which none of ``others`` (sorted by begin) runs."""
    merged: list[list[int]] = []
    for begin, end in others:
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    starts = np.array([begin for begin, _ in merged])
    exposed_time = 0
    for begin, end in stores:
        hidden = 0
        index = max(0, int(np.searchsorted(starts, begin, side="right")) - 1)
        while index < len(merged) and merged[index][0] < end:
            hidden += max(0, min(end, merged[index][1]) - max(begin, merged[index][0]))
            index += 1
        exposed_time += end - begin - hidden
    return exposed_time
