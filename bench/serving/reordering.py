"""Exposed reordering: the share of a step that writing tiles costs, under open-loop chat traffic.

Requests of chat-shaped lengths come at a fixed rate; the steps that the engine makes of them are
recorded, sorted into strata by kind and size, and one step of each stratum is measured with and
without its store (:mod:`bench.serving.steps`). A stratum stands for the time of all its steps.

Clocks: ``gpu`` times the device alone. ``as run`` times prefill steps on the host's clock, since
the engine launches them one kernel at a time, and decode steps, which it replays as graphs, as
``gpu``. On a CPU both are the host's clock.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Sequence
from typing import Any

from bench.serving.load import CHAT, finish, open_loop, submit
from bench.serving.steps import Exposed, StepShape, exposed, recorded
from bicl.frontends.http.engine import Engine

__all__ = ["prefill_rows", "traffic_rows"]

STRATA = {"prefill": 8, "decode": 5}


def traffic_rows(
    engine: Engine,
    *,
    rate: float,
    seconds: float,
    shrink: float,
    rounds: int,
    clocks: Sequence[str],
) -> list[dict[str, Any]]:
    """Rows for all steps, prefill steps and decode steps of one load, and both clocks."""
    shapes: list[StepShape] = []
    lengths = CHAT.shrunk(shrink)
    finish(submit(engine, range(4, 68), 4))
    before = engine.snapshot()
    with recorded(engine, shapes):
        began = time.perf_counter()
        streams = open_loop(engine, lengths, rate, seconds)
        elapsed = time.perf_counter() - began
    after = engine.snapshot()
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
    rows = []
    measured: dict[tuple[str, str], list[tuple[int, StepShape, Exposed]]] = {}
    for clock in clocks:
        strata = {}
        for kind in STRATA:
            real = _clock(engine, kind, clock)
            if (kind, real) not in measured:
                measured[kind, real] = _measure(engine, _strata(shapes, kind), real, rounds)
            strata[kind] = measured[kind, real]
        strata["all"] = strata["prefill"] + strata["decode"]
        rows += [
            {"case": f"exposed reordering, {kind}", "clock": clock, **_sum(found), **load}
            for kind, found in strata.items()
            if found
        ]
    return rows


def prefill_rows(
    engine: Engine, shapes: Sequence[tuple[int, int]], *, rounds: int, clocks: Sequence[str]
) -> list[dict[str, Any]]:
    """Speed of a prefill with its store against one that writes nothing. ``shapes``: sequences
    and tokens of each."""
    rows = []
    for clock in clocks:
        for batch, tokens in shapes:
            found = exposed(
                engine._runner,
                StepShape((tokens,) * batch, (0,) * batch),
                clock=_clock(engine, "prefill", clock),
                rounds=rounds,
            )
            rows.append(
                {
                    "case": "prefill with reordering",
                    "shape": f"{batch}x{tokens}",
                    "clock": clock,
                    "value": (found.step_us - found.store_us) / found.step_us,
                    "unit": "x",
                    "step_us": round(found.step_us, 1),
                    "store_us": round(found.store_us, 1),
                }
            )
            gc.collect()
    return rows


def _strata(shapes: Sequence[StepShape], kind: str) -> list[list[StepShape]]:
    """Steps of one kind in groups of about equal number, ordered by size."""
    chosen = sorted(
        (s for s in shapes if s.is_decode == (kind == "decode")),
        key=lambda s: (s.num_tokens, sum(s.starts)),
    )
    count = min(STRATA[kind], len(chosen))
    edges = [len(chosen) * i // count for i in range(count + 1)] if count else []
    return [chosen[a:b] for a, b in itertools.pairwise(edges)]


def _measure(
    engine: Engine, strata: list[list[StepShape]], clock: str, rounds: int
) -> list[tuple[int, StepShape, Exposed]]:
    found = []
    for group in strata:
        middle = group[len(group) // 2]
        found.append(
            (len(group), middle, exposed(engine._runner, middle, clock=clock, rounds=rounds))
        )
    return found


def _clock(engine: Engine, kind: str, clock: str) -> str:
    if engine.loaded.device.type == "cpu":
        return "wall"
    return "wall" if (kind, clock) == ("prefill", "as run") else "gpu"


def _sum(strata: list[tuple[int, StepShape, Exposed]]) -> dict[str, Any]:
    step = sum(count * found.step_us for count, _, found in strata)
    store = sum(count * found.store_us for count, _, found in strata)
    return {
        "value": store / step,
        "unit": "of step time",
        "steps": sum(count for count, _, _ in strata),
        "strata": [
            {
                "steps": count,
                "rows": len(shape.counts),
                "tokens": shape.num_tokens,
                "context": sum(shape.starts),
                "step_us": round(found.step_us, 1),
                "store_us": round(found.store_us, 2),
                "share": round(found.share, 5),
            }
            for count, shape, found in strata
        ],
    }
