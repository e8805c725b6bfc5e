"""What a side stream would bring stores, told apart from when attention behind them may start.

A step is captured in a CUDA graph once for each contestant:

* **in line**: as the server runs it. In decode attention is launched with the store, and streams
  old pages while the newest token is written.
* **in line, attention waits**: launched as early, it waits for the whole store before it reads.
* **in line, attention not early**: launched when the store has ended.
* **side stream**: every store on a stream of its own, forked and joined by events. Attention behind
  a join waits for all of the store, so the stream's own part is what this differs by from the two
  before, not from the first.
* **in line, product early**: the product behind attention is let in while that still runs, also
  where attention leaves half of the SMs idle (elsewhere as in line).
* **in line again**: what two captures of the same step differ by.

Graphs share their memory, so that intermediate results lie at the same addresses. They are launched
in a row, in random order, each while the one before still runs: no time of the host's is in it.
Ratios are taken within a row; each step is captured several times over.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch

from bench.serving.paired import median_of
from bench.serving.steps import Run, StepShape, captured, step
from bicl.frontends.http.engine import Engine
from bicl.frontends.http.engine.runner import ModelRunner

__all__ = ["side_stream_rows", "speeds"]

Way = Callable[[ModelRunner], AbstractContextManager[None]]
Times = Mapping[str, Sequence[float]]

IN_LINE, WAITS, NOT_EARLY = "in line", "in line, attention waits", "in line, attention not early"
SIDE, PRODUCT, AGAIN = "side stream", "in line, product early", "in line again"


@contextmanager
def _attention_waits(runner: ModelRunner) -> Iterator[None]:
    backend: Any = runner.backend
    store = backend.store

    def forgotten(*args: Any, **options: Any) -> None:
        store(*args, **options)
        backend._stored = None

    with patch.object(backend, "store", forgotten):
        yield


@contextmanager
def _attention_not_early(runner: ModelRunner) -> Iterator[None]:
    backend: Any = runner.backend
    run = backend.run

    def late(*args: Any, **options: Any) -> Any:
        with patch.object(backend, "pdl", False):
            return run(*args, **options)

    with patch.object(backend, "run", late):
        yield


@contextmanager
def _on_side_stream(runner: ModelRunner) -> Iterator[None]:
    backend: Any = runner.backend
    store, side = backend.store, torch.cuda.Stream()

    def aside(*args: Any, **options: Any) -> None:
        here = torch.cuda.current_stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            store(*args, **options)
        here.wait_stream(side)
        backend._stored = None  # attention follows the join, not the store

    with patch.object(backend, "store", aside):
        yield


@contextmanager
def _product_early(runner: ModelRunner) -> Iterator[None]:
    with patch("bicl.ops.cuda.linear.leaves_sms_idle", lambda num_pairs, num_sms: False):
        yield


WAYS: dict[str, Way] = {
    IN_LINE: lambda runner: nullcontext(),
    WAITS: _attention_waits,
    NOT_EARLY: _attention_not_early,
    SIDE: _on_side_stream,
    PRODUCT: _product_early,
    AGAIN: lambda runner: nullcontext(),
}


def side_stream_rows(
    engine: Engine, shapes: Sequence[StepShape], *, rounds: int, captures: int = 3
) -> Iterator[dict[str, Any]]:
    """Speeds of the contestants against stores in line, a row a step. ``rounds``: of each of the
    ``captures``."""
    for shape in shapes:
        times = [_times(engine, shape, rounds) for _ in range(captures)]
        yield {
            "case": "stores on a side stream",
            "shape": f"{len(shape.counts)}x{shape.counts[0] + shape.starts[0]}, "
            f"{sum(shape.counts)} tokens computed",
            **speeds(times),
        }


def speeds(captures: Sequence[Times]) -> dict[str, Any]:
    """What a row says of the times, one mapping a capture: medians and their intervals over all,
    and each capture's own median."""

    def against(name: str, other: str) -> dict[str, Any]:
        each = [
            [b / a for a, b in zip(times[name], times[other], strict=True)] for times in captures
        ]
        found = median_of(ratio for ratios in each for ratio in ratios)
        return {
            "value": found.value,
            "interval": [found.low, found.high],
            "by_capture": [median_of(ratios).value for ratios in each],
        }

    own = median_of(us for times in captures for us in times[IN_LINE])
    return {
        **against(SIDE, IN_LINE),
        "unit": "x the speed of stores in line",
        "others": {name: against(name, IN_LINE) for name in (WAITS, NOT_EARLY, PRODUCT, AGAIN)},
        "side_stream_against": {name: against(SIDE, name) for name in (WAITS, NOT_EARLY)},
        "step_us": round(own.value, 1),
        "rounds": own.count,
    }


def _times(engine: Engine, shape: StepShape, rounds: int) -> dict[str, list[float]]:
    """Microseconds of each contestant, round by round; the first round is left out."""
    run = step(engine._runner, shape)
    run()  # the workspace grows before anything is captured
    pool = torch.cuda.graph_pool_handle()
    replays = {"": captured(run, pool)}  # lays the memory out that the others find
    for name, way in WAYS.items():
        with way(engine._runner):
            replays[name] = captured(run, pool)
    rng = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    for number in range(rounds + 1):
        order = rng.sample(list(WAYS), len(WAYS))
        for name, us in zip(order, _in_a_row([replays[name] for name in order]), strict=True):
            if number:
                times[name].append(us)
    return times


def _in_a_row(runs: Sequence[Run]) -> list[float]:
    """Microseconds of each on the device. One goes ahead of all, so that the first does not wait
    for the host either."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(runs) + 1)]
    runs[-1]()
    for run, mark in zip(runs, marks, strict=False):
        mark.record()
        run()
    marks[-1].record()
    marks[-1].synchronize()
    return [1e3 * begin.elapsed_time(end) for begin, end in pairwise(marks)]
