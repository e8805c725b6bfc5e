"""Time GPU calls so that the numbers of one run can be compared with each other.

Four things make such a number honest, and each has one place here:

* **Cold.** A call is a list of callables over disjoint memory; :func:`num_rotations` says how many
  are needed for at least ``COLD_BYTES`` to pass between two reads of the same byte. No cache
  holds that much.
* **No host in it.** Calls are replayed from one CUDA graph, and the replay's time is divided by
  the number of calls. Kernels and the gaps between them count; Python does not.
* **Same conditions.** Clocks and temperature drift by several per cent within minutes. All
  contestants of one comparison take turns, every second round in reverse order.
* **Spread.** Median with the 20th and 80th percentile over the rounds.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

__all__ = [
    "COLD_BYTES",
    "Call",
    "Comparison",
    "Sample",
    "compare",
    "graph_calls",
    "host_cost",
    "num_rotations",
    "summarise",
]

Call = Callable[[], object]

COLD_BYTES = 1 << 30
MAX_CALLS = 600


@dataclass(frozen=True)
class Sample:
    """Time of one call in microseconds over ``rounds`` measurements."""

    median: float
    p20: float
    p80: float
    rounds: int


@dataclass(frozen=True)
class Comparison:
    """What :func:`compare` found: a sample for each contestant, or why it has none."""

    samples: dict[str, Sample]
    errors: dict[str, str]


def summarise(times_us: Sequence[float]) -> Sample:
    """Median and 20th / 80th percentile of ``times_us`` (not empty)."""
    p20, median, p80 = np.percentile(np.asarray(times_us, dtype=np.float64), [20, 50, 80])
    return Sample(float(median), float(p20), float(p80), len(times_us))


def num_rotations(bytes_per_call: int, arena_bytes: int, cold_bytes: int = COLD_BYTES) -> int:
    """Disjoint sets of memory to rotate over, so that ``cold_bytes`` pass before a re-read.

    Never more than fit in ``arena_bytes``, never less than one.
    """
    wanted = -(-cold_bytes // bytes_per_call)
    return max(1, min(wanted, arena_bytes // bytes_per_call, MAX_CALLS))


def graph_calls(rotations: int, call_us: float, graph_us: float) -> int:
    """Calls in one graph: about ``graph_us`` long, and every rotation the same number of times."""
    wanted = min(MAX_CALLS, max(1, int(graph_us / max(call_us, 1.0))))
    return max(1, wanted // rotations) * rotations


def compare(
    contestants: Mapping[str, Sequence[Call]],
    *,
    rounds: int = 11,
    graph_us: float = 3000.0,
    captured: Call | None = None,
) -> Comparison:
    """Time contestants against each other.

    Args:
        contestants: name -> callables that do the same work on disjoint memory, safe to capture.
        rounds: replays of each contestant, taken in turns.
        graph_us: wanted length of one replay in microseconds.
        captured: called when all are captured, before the first of them is timed.

    A contestant that raises is reported in ``errors`` and does not stop the others.
    """
    graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]] = {}
    errors: dict[str, str] = {}
    for name, calls in contestants.items():
        try:
            graphs[name] = _capture(calls, graph_us)
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            torch.cuda.synchronize()
    if captured is not None:
        captured()
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for index in range(rounds):
        order = list(graphs) if index % 2 == 0 else list(reversed(graphs))
        pending = [(name, *_replay(graphs[name][0])) for name in order]
        torch.cuda.synchronize()
        for name, start, stop in pending:
            times[name].append(start.elapsed_time(stop) * 1e3 / graphs[name][1])
    graphs.clear()
    gc.collect()
    torch.cuda.empty_cache()
    return Comparison({name: summarise(values) for name, values in times.items()}, errors)


def _capture(calls: Sequence[Call], graph_us: float) -> tuple[torch.cuda.CUDAGraph, int]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:3]:
            call()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        probe = calls[: min(len(calls), 8)]
        start.record()
        for call in probe:
            call()
        stop.record()
    torch.cuda.synchronize()
    call_us = start.elapsed_time(stop) * 1e3 / len(probe)
    count = graph_calls(len(calls), call_us, graph_us)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(count):
            calls[index % len(calls)]()
    graph.replay()
    torch.cuda.synchronize()
    return graph, count


def _replay(graph: torch.cuda.CUDAGraph) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    stop.record()
    return start, stop


def host_cost(
    contestants: Mapping[str, Call], *, rounds: int = 31, burst: int = 32
) -> dict[str, Sample]:
    """Host time to issue one eager call, in microseconds; the device queue never fills.

    Contestants take turns, so that a slow moment of the host hits all of them.
    """
    for call in contestants.values():
        for _ in range(burst):
            call()
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, call in contestants.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(burst):
                call()
            times[name].append((time.perf_counter() - start) / burst * 1e6)
    torch.cuda.synchronize()
    return {name: summarise(values) for name, values in times.items()}
