"""What a step's store costs: the same step with and without it, in turns.

A step is its rows' lengths. It runs on random tokens and pages, once as it is and once with
``backend.store`` left out (attention reads the same pages and does the same work), and the
difference is the time of reordering that nothing hides.

Two clocks. ``gpu``: both are captured in CUDA graphs and replayed, so only the device counts.
``wall``: both are called eagerly, and the host's part counts too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bicl.attention.metadata import AttentionMetadata
from bicl.attention.pool import LayerCache
from bicl.frontends.http.engine.runner import ModelRunner

__all__ = ["Exposed", "StepShape", "captured_step", "exposed", "without_store"]

Run = Callable[[], object]


@dataclass(frozen=True)
class StepShape:
    """Tokens computed and tokens before them, for each row of a step."""

    counts: tuple[int, ...]
    starts: tuple[int, ...]


@contextmanager
def without_store(runner: ModelRunner) -> Iterator[None]:
    """Attention reads whatever the pages hold, and is launched as early as after a store."""
    backend: Any = runner.backend

    def skip(
        layer: LayerCache, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
    ) -> None:
        backend._stored = (layer.pages, slots)

    backend.store = skip
    try:
        yield
    finally:
        del backend.store


@dataclass(frozen=True)
class Exposed:
    """Microseconds of one step as it is, and the part of it that is the store's."""

    step_us: float
    store_us: float

    @property
    def share(self) -> float:
        return self.store_us / self.step_us


def exposed(runner: ModelRunner, shape: StepShape, *, clock: str, rounds: int) -> Exposed:
    """Measure one step. ``clock`` is ``gpu`` or ``wall``; the device must be idle."""
    run = _step(runner, shape)
    run()  # the workspace grows before anything is captured
    if clock == "gpu":
        stored = _captured(run)
        with without_store(runner):
            bare = _captured(run)
        return _difference(stored, bare, _gpu_us, rounds)

    def run_bare() -> None:
        with without_store(runner):
            run()

    return _difference(run, run_bare, lambda call: _wall_us(call, runner.device), rounds)


def captured_step(runner: ModelRunner, shape: StepShape) -> Run:
    """A call that runs the step: a graph's replay, on a CPU the step itself."""
    run = _step(runner, shape)
    run()
    return _captured(run) if runner.device.type == "cuda" else run


def _difference(stored: Run, bare: Run, clock: Callable[[Run], float], rounds: int) -> Exposed:
    """Medians over pairs that follow each other, every second pair in reverse order."""
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        order = (0, 1) if number % 2 else (1, 0)
        pair = {which: clock((stored, bare)[which]) for which in order}
        if number:  # the first pair warms up
            times[0].append(pair[0])
            times[1].append(pair[1])
    step = statistics.median(times[0])
    store = statistics.median(a - b for a, b in zip(*times, strict=True))
    return Exposed(step, store)


def _step(runner: ModelRunner, shape: StepShape) -> Run:
    """A call that computes the step on random tokens, in random pages of the pool."""
    device, page = runner.device, runner.page_size
    counts, starts = np.array(shape.counts), np.array(shape.starts)
    lengths = counts + starts
    held = -(-lengths // page)
    rng = np.random.default_rng(0)
    pages = rng.permutation(runner.pool.num_pages)[: int(held.sum())]
    if len(pages) < held.sum():
        raise ValueError(f"the step needs {held.sum()} pages, the pool has {len(pages)}")
    table = np.zeros((len(counts), int(held.max())), dtype=np.int32)
    table[np.arange(table.shape[1]) < held[:, None]] = pages
    ends = np.cumsum(counts)
    row_of = np.repeat(np.arange(len(counts)), counts)
    positions = np.arange(ends[-1]) - (ends - counts)[row_of] + starts[row_of]
    slots = table[row_of, positions // page].astype(np.int64) * page + positions % page
    ids = rng.integers(4, 1000, int(ends[-1]))

    def put(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device, dtype)

    meta = AttentionMetadata(
        page_table=put(table, torch.int32),
        cache_seqlens=put(lengths, torch.int32),
        cu_seqlens_q=put(np.concatenate([[0], ends]), torch.int32),
        slot_mapping=put(slots, torch.int64),
        max_q=int(counts.max()),
        max_k=int(lengths.max()),
    )
    arguments = (
        put(ids, torch.int64),
        put(positions, torch.int64),
        meta,
        put(ends - 1, torch.int64),
    )
    return lambda: runner._model(*arguments)


def _captured(run: Run) -> Run:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.inference_mode():
        run()
    return graph.replay


def _gpu_us(call: Run) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def _wall_us(call: Run, device: torch.device) -> float:
    _synchronize(device)
    began = time.perf_counter()
    call()
    _synchronize(device)
    return (time.perf_counter() - began) * 1e6


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
