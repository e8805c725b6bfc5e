"""Exposed reordering: the share of a step that writing tiles costs and nothing hides.

* **traffic**: requests of chat-shaped lengths come at a fixed rate, whatever the engine answers.
  While they come, each step has prompt tokens of some; when they stop and all prompts are computed,
  those that still run decode, and that is watched, too. It comes three times: unwatched, for how
  long steps take; with CUPTI recording every kernel; and so once more, storing nothing.
* **decode**, **prefill**: one step captured in a CUDA graph with and without its store, in turns
  (:mod:`bench.serving.steps`), and the timeline of its kernels (``timeline``).

In a timeline the kernels that store, or turn keys, are exposed while no other kernel runs; what
they are exposed longer than without stores, the stores cost. ``store_kernels`` counts all of their
time, hidden or not. ``by_the_engines_clock`` is what the server's own metric says
(:mod:`bicl.attention.store_clock`).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from bench.serving.load import CHAT, ChatLengths, finish, open_loop, submit
from bench.serving.steps import Exposed, Run, StepShape, exposed, step_pair, without_store
from bicl.frontends.http.engine import Engine

__all__ = [
    "Traffic",
    "compared",
    "decode_rows",
    "exposed_ns",
    "prefill_rows",
    "traffic_rows",
]

Rows = list[dict[str, Any]]

DECODE_STEPS = 40
"""Watched after the last request came."""

TAIL_SECONDS = 8.0
"""For these steps, at most: prompts that still wait must be computed first."""

STORE_KERNELS = ("store_kv_kernel", "rotate_and_store_kernel", "rotate_kernel")
"""What stores, and what remains of it without stores."""

Spans = list[tuple[int, int]]
Kernels = list[tuple[int, int, bool]]
"""``(begin, end, stores or turns keys)`` in ns since the epoch."""


def traffic_rows(engine: Engine, *, rate: float, seconds: float, shrinks: Sequence[float]) -> Rows:
    """Rows for all steps, and for those with and without prompt tokens, of each traffic. The
    engine stores nothing in decode steps afterwards."""
    finish(submit(engine, range(4, 68), 4))
    plain, stored, bare = [], [], []
    for number, shrink in enumerate(shrinks):
        lengths = CHAT.shrunk(shrink)
        plain.append(_traffic(engine, lengths, rate, seconds, 3 * number, watched=False))
        stored.append(_traffic(engine, lengths, rate, seconds, 3 * number + 1))
    graphs = engine._runner.graphs
    with without_store(engine._runner):
        if graphs is not None:
            graphs.capture()
        for number, shrink in enumerate(shrinks):
            bare.append(_traffic(engine, CHAT.shrunk(shrink), rate, seconds, 3 * number + 2))
    rows = []
    for shrink, *passes in zip(shrinks, plain, stored, bare, strict=True):
        for kind, wanted in KINDS.items():
            row = {"case": f"exposed reordering, {kind}", "lengths_divided_by": shrink}
            rows.append(row | compared(*passes, wanted) | passes[0].load)
    return rows


KINDS = {"all": (True, False), "prefill": (False,), "decode": (True,)}


@dataclass
class Traffic:
    """Steps as ``(begin, end, is decode)`` in ns since the epoch, and the kernels in them."""

    steps: list[tuple[int, int, bool]]
    kernels: Kernels
    load: dict[str, Any]

    def of(self, decodes: bool) -> Spans:
        return [(begin, end) for begin, end, is_decode in self.steps if is_decode == decodes]


def _traffic(
    engine: Engine,
    lengths: ChatLengths,
    rate: float,
    seconds: float,
    prompts: int,
    *,
    watched: bool = True,
) -> Traffic:
    """One pass. ``prompts``: other ones for each number; lengths and times are the same."""
    before = engine.snapshot()
    # Steps while the profiler opens or closes would be steps without kernels.
    with _kernels(engine, watched) as kernels, _steps(engine) as steps:
        began = time.perf_counter()
        streams = open_loop(engine, lengths, rate, seconds, prompts=prompts)
        elapsed = time.perf_counter() - began
        after = engine.snapshot()
        _let_decode(engine)
        end = engine.snapshot()
    for stream in streams:
        stream.close()
    while engine.snapshot().batch_size or engine.snapshot().queue_size:
        time.sleep(0.02)
    new = after.generated_tokens - before.generated_tokens
    load = {
        "offered_per_second": round(len(streams) / elapsed, 1),
        "finished_per_second": round((after.finished - before.finished) / elapsed, 1),
        "waiting_at_end": after.queue_size,
        "running_at_end": after.batch_size,
        "prompt_tokens_per_second": round(
            (after.prefilled_tokens - before.prefilled_tokens) / elapsed
        ),
        "new_tokens_per_second": round(new / elapsed),
        "by_the_engines_clock": {
            "prefill": (end.prefill_store_time - before.prefill_store_time)
            / ((end.prefill_time - before.prefill_time) or 1),
            "decode": (end.decode_store_time - before.decode_store_time)
            / ((end.decode_time - before.decode_time) or 1),
        },
    }
    return Traffic(steps, kernels, load)


def compared(
    plain: Traffic, stored: Traffic, bare: Traffic, wanted: Sequence[bool]
) -> dict[str, Any]:
    """What storing costs the steps of these kinds, as many of each as came unwatched; no value
    where one of them was not seen."""
    spans = {kind: plain.of(kind) for kind in wanted if plain.of(kind)}
    watched = [{kind: traffic.of(kind) for kind in spans} for traffic in (stored, bare)]
    if not spans or not all(all(of_kind.values()) for of_kind in watched):
        return {"steps": 0}
    num_steps = sum(map(len, spans.values()))
    step_ns = sum(end - begin for steps in spans.values() for begin, end in steps) / num_steps

    def mean(steps: Mapping[bool, Spans], kernels: Kernels) -> dict[str, float]:
        total: dict[str, float] = defaultdict(float)
        for kind, weight in spans.items():
            for name, value in _per_step(steps[kind], kernels).items():
                total[name] += value * len(weight) / num_steps
        return total

    with_stores, without = mean(watched[0], stored.kernels), mean(watched[1], bare.kernels)
    exposed = with_stores["exposed"] - without["exposed"]
    return {
        "value": exposed / step_ns,
        "unit": "of step time",
        "exposed_us_per_step": round(exposed / 1e3, 2),
        "ms_per_step": round(step_ns / 1e6, 3),
        "store_kernels": (with_stores["all"] - without["all"]) / step_ns,
        "of_gpu_busy": exposed / with_stores["busy"] if with_stores["busy"] else 0.0,
        "gpu_busy_ms_per_step": round(with_stores["busy"] / 1e6, 3),
        "stores_seen_per_step": with_stores["count"],
        "steps": num_steps,
        "steps_watched": [sum(map(len, of_kind.values())) for of_kind in watched],
    }


def _let_decode(engine: Engine) -> None:
    """Return when some steps had no prompt tokens, or there will be none."""
    deadline, first = time.perf_counter() + TAIL_SECONDS, engine.snapshot().decode_steps
    while time.perf_counter() < deadline:
        stats = engine.snapshot()
        if stats.decode_steps >= first + DECODE_STEPS or not stats.batch_size + stats.queue_size:
            return
        time.sleep(0.02)


def decode_rows(
    engine: Engine, shapes: Sequence[tuple[int, int]], *, rounds: int, replays: int = 8
) -> Rows:
    """``shapes``: batch and context. Decode steps replayed from a graph, as the engine does."""
    rows = []
    for batch, context in shapes:
        shape = StepShape((1,) * batch, (context - 1,) * batch)
        pair = step_pair(engine._runner, shape)
        found = exposed(pair, engine.loaded.device, rounds=rounds)
        timeline = _timeline(engine, pair, replays)
        rows.append(
            {
                "case": "exposed reordering in a decode step",
                "shape": f"{batch}x{context}",
                "batch": batch,
                # A step's time wanders by more than its stores take: the timeline is exact.
                "value": timeline.get("timeline", found.share.value),
                "by_pairs": found.share.value,
                **_difference(found),
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
                "value": 1 - found.share.value,
                **_difference(found),
                "unit": "x",
                **_timeline(engine, pair, 1),
            }
        )
    return rows


def _difference(found: Exposed) -> dict[str, Any]:
    share = found.share
    return {
        "unit": "of step time",
        "store_share_interval": [share.low, share.high],
        "step_us": round(found.step_us, 1),
        "store_us": round(share.value * found.step_us, 1),
        "pairs": share.count,
    }


def _timeline(engine: Engine, pair: tuple[Run, Run], replays: int) -> dict[str, Any]:
    """The same from the kernels' own begins and ends; nothing where there is no GPU."""
    found = []
    for run in pair:
        with _kernels(engine) as kernels:
            for _ in range(replays):
                run()
        if not kernels:
            return {}
        whole = [(kernels[0][0], max(end for _, end, _ in kernels) + 1)]
        found.append((whole[0][1] - whole[0][0], _per_step(whole, kernels)))
    (total, stored), (_, bare) = found
    return {
        "timeline": (stored["exposed"] - bare["exposed"]) / total,
        "store_kernels": (stored["all"] - bare["all"]) / total,
        "stores_seen": stored["count"],
    }


@contextmanager
def _steps(engine: Engine) -> Iterator[list[tuple[int, int, bool]]]:
    """Note when the engine steps, and whether a step only decodes."""
    steps: list[tuple[int, int, bool]] = []
    runner = engine._runner
    step, forward = engine.step, runner.forward
    kinds: list[bool] = []

    def timed_step() -> bool:
        kinds.clear()
        began = time.time_ns()
        more = step()
        if kinds:
            steps.append((began, time.time_ns(), kinds[0]))
        return more

    def noted_forward(chunks: Any, *args: Any, **options: Any) -> torch.Tensor:
        kinds.append(all(chunk.count == 1 for chunk in chunks))
        return forward(chunks, *args, **options)

    engine.step, runner.forward = timed_step, noted_forward  # type: ignore[method-assign]
    try:
        yield steps
    finally:
        del engine.step, runner.forward


@contextmanager
def _kernels(engine: Engine, watched: bool = True) -> Iterator[Kernels]:
    """Kernels that ran. Filled at the end; stays empty on a CPU and where nobody watches."""
    found: Kernels = []
    if engine.loaded.device.type == "cpu" or not watched:
        yield found
        return
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        yield found
        torch.cuda.synchronize()
    for event in profiler.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            begin, name = event.start_ns(), event.name()
            stores = any(kernel in name for kernel in STORE_KERNELS)
            found.append((begin, begin + event.duration_ns(), stores))
    found.sort()


def _per_step(steps: Sequence[tuple[int, int]], kernels: Kernels) -> dict[str, float]:
    """Means of the steps, in ns: how long the kernels that store or turn keys were exposed, and
    ran; how long any kernel ran; how many stored or turned keys."""
    begins = np.array([begin for begin, _ in steps])
    ends = np.array([end for _, end in steps])
    inside = [k for k in kernels if _covers(begins, ends, k[0])]
    stores = [(begin, end) for begin, end, is_store in inside if is_store]
    others = [(begin, end) for begin, end, is_store in inside if not is_store]
    exposed = exposed_ns(stores, others)
    sums = {
        "exposed": exposed,
        "all": sum(end - begin for begin, end in stores),
        "busy": exposed + sum(end - begin for begin, end in _merged(others)),
        "count": len(stores),
    }
    return {name: value / len(steps) for name, value in sums.items()}


def _covers(begins: np.ndarray, ends: np.ndarray, at: int) -> bool:
    index = int(np.searchsorted(begins, at, side="right")) - 1
    return index >= 0 and at < ends[index]


def _merged(spans: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Spans, sorted by begin, without what they have in common."""
    merged: list[list[int]] = []
    for begin, end in spans:
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    return merged


def exposed_ns(stores: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]]) -> int:
    """Time in ``stores`` during which none of ``others`` (sorted by begin) runs."""
    merged = _merged(others)
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
