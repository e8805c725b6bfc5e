"""What a step's store costs: the same step with and without it, in turns.

A step is its rows' lengths. It runs on random tokens and pages, once as it is and once with
``backend.store`` left out (attention reads the same pages and does the same work), and the
difference is the time of reordering that nothing hides.

Shares are medians over pairs of runs that follow each other (:mod:`bench.serving.paired`).

On a GPU both are captured in CUDA graphs and replayed, so that only the device counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch

from bench.serving.paired import Median, median_of, orders
from bicl.attention.metadata import AttentionMetadata
from bicl.attention.pool import LayerCache
from bicl.attention.rotary import Rotary
from bicl.frontends.http.engine.runner import ModelRunner

__all__ = [
    "Exposed",
    "Run",
    "StepShape",
    "captured",
    "exposed",
    "step",
    "step_pair",
    "without_store",
]

Run = Callable[[], object]


@dataclass(frozen=True)
class StepShape:
    """Tokens computed and tokens before them, for each row of a step."""

    counts: tuple[int, ...]
    starts: tuple[int, ...]


@contextmanager
def without_store(runner: ModelRunner) -> Iterator[None]:
    """Attention reads whatever the pages hold, and is launched as early as after a store. What is
    turned where it is stored is turned all the same."""
    backend: Any = runner.backend

    rotate = import_module(f"bicl.ops.{runner.device.type}.rotary").rotate

    def skip(
        layer: LayerCache,
        key: torch.Tensor,
        value: torch.Tensor,
        slots: torch.Tensor,
        *,
        rotary: Rotary | None = None,
    ) -> None:
        if rotary is not None:
            rotate(rotary.query, key, rotary.cos, rotary.sin)
        backend._stored = (layer.pages, slots)

    backend.store = skip
    try:
        yield
    finally:
        del backend.store


@dataclass(frozen=True)
class Exposed:
    """Microseconds of one step as it is, and the share of it that the other way does without."""

    step_us: float
    share: Median


def exposed(pair: tuple[Run, Run], device: torch.device, *, rounds: int) -> Exposed:
    """Measure a :func:`step_pair`; the device must be idle."""
    clock = _gpu_us if device.type == "cuda" else lambda call: _wall_us(call, device)
    return _compared(*pair, clock, rounds)


def step_pair(runner: ModelRunner, shape: StepShape) -> tuple[Run, Run]:
    """Two calls that run the step, as it is and without its stores: replays of graphs, on a CPU the
    steps themselves."""
    run = step(runner, shape)
    run()  # the workspace grows before anything is captured

    def run_bare() -> None:
        with without_store(runner):
            run()

    if runner.device.type != "cuda":
        return run, run_bare
    run_bare()
    return captured(run), captured(run_bare)


def _compared(stored: Run, bare: Run, clock: Callable[[Run], float], rounds: int) -> Exposed:
    times, shares = [], []
    for _, order in zip(range(rounds + 1), orders((stored, bare)), strict=False):
        pair = {run: clock(run) for run in order}
        times.append(pair[stored])
        shares.append(1 - pair[bare] / pair[stored])
    return Exposed(statistics.median(times[1:]), median_of(shares[1:]))  # the first warms up


def step(runner: ModelRunner, shape: StepShape) -> Run:
    """A call that computes the step on random tokens, in random pages of the pool."""
    runner._cache.clock = None  # the engine's own would hold its layer up
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


def captured(run: Run, pool: Any = None) -> Run:
    """The replay of a CUDA graph of ``run``. ``pool``: ``torch.cuda.graph_pool_handle()``, memory
    that graphs share, so that their intermediate results lie at the same addresses."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool), torch.inference_mode():
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
