"""How long storing keys and values holds a step up: the part of reordering that nothing hides."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from bicl.attention.backend import AttentionBackend
from bicl.attention.pool import LayerCache
from bicl.attention.rotary import Rotary

__all__ = ["StoreClock", "time_stores"]

REPLAYS = 5

LEAST_STORES = 32
"""In a graph that is timed: one takes little longer than the clock's tick."""


class StoreClock:
    """Times one layer's store in every step; all layers together take that many times as long.

    On a GPU two events enclose the store, on the stream itself: whatever they are apart, the
    attention behind them waited, be it for the kernel or for the host to launch it. Between them
    nothing overlaps, so the timed layer gives up what the others may gain by programmatic
    launches: what is told is the most that can be exposed. Costs a few microseconds a step.

    In a CUDA graph events would cost more than the stores themselves (2 % of a step, measured). A
    replay counts as :func:`time_stores` found when the graph was captured.

    Args:
        device: where the pages are.
        num_layers: that store in a step.

    Attributes:
        layer: the one to time; call :meth:`begin` and :meth:`end` around its store.
    """

    def __init__(self, device: torch.device, num_layers: int) -> None:
        self.layer = num_layers // 2
        self._num_layers = num_layers
        self._on_device = device.type == "cuda"
        self._began = 0.0
        self._seconds = 0.0
        self._free: list[_Span] = []
        self._running: deque[_Span] = deque()

    def begin(self) -> None:
        if not self._on_device:
            self._began = time.perf_counter()
        elif not torch.cuda.is_current_stream_capturing():
            self._running.append(self._free.pop() if self._free else _Span())
            self._running[-1].begin.record()

    def end(self) -> None:
        if not self._on_device:
            self._seconds += (time.perf_counter() - self._began) * self._num_layers
        elif not torch.cuda.is_current_stream_capturing():
            self._running[-1].end.record()

    def replayed(self, seconds: float) -> None:
        """A graph was launched whose stores take so long."""
        self._seconds += seconds

    def take(self) -> float:
        """Seconds of the stores that ended since the last call. Waits for nothing: what still runs
        is told by a later call."""
        while self._running and self._running[0].end.query():  # type: ignore[no-untyped-call]
            span = self._running.popleft()
            milliseconds = float(span.begin.elapsed_time(span.end))
            self._seconds += milliseconds / 1000 * self._num_layers
            self._free.append(span)
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class _Span:
    """Events around one store."""

    __slots__ = ("begin", "end")

    def __init__(self) -> None:
        self.begin, self.end = _timer(), _timer()


def time_stores(
    backend: AttentionBackend,
    layers: Sequence[LayerCache],
    num_tokens: int,
    dtype: torch.dtype,
    rotary: tuple[int, int] | None = None,
) -> float:
    """Seconds that the stores of all layers add to a CUDA graph in which each follows a short
    kernel, as it follows a product or the rotation of the keys in a model.

    Writes to the first slots, which nobody may be using; the device must be idle.

    Args:
        rotary: query heads and turned dims of a model whose keys are turned where they are stored:
            what is left of that launch if nothing is stored does not count.
    """
    device = layers[0].device
    room = min(layer.num_pages * layer.layout.page_size for layer in layers)
    slots = torch.arange(num_tokens, device=device) % room
    nowhere = torch.full_like(slots, -1)
    rows = []
    for layer in layers:
        heads, dim = layer.layout.num_kv_heads, layer.layout.head_dim
        row = torch.zeros(num_tokens, heads, dim, dtype=dtype, device=device)
        turn = None
        if rotary is not None:
            query = torch.zeros(num_tokens, rotary[0], dim, dtype=dtype, device=device)
            angles = torch.zeros(num_tokens, rotary[1], dtype=dtype, device=device)
            turn = Rotary(query, angles, angles)
        rows.append((layer, row, turn))
    turns = -(-LEAST_STORES // len(layers))

    def chain(where: torch.Tensor) -> None:
        for layer, row, turn in rows * turns:
            row.add_(1)
            if where is slots or turn is not None:
                backend.store(layer, row, row, where, rotary=turn)

    with_stores = _fastest_replay(lambda: chain(slots))
    return max(0.0, with_stores - _fastest_replay(lambda: chain(nowhere))) / turns


def _fastest_replay(run: Callable[[], None]) -> float:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    seconds = []
    for _ in range(REPLAYS):
        begin, end = _timer(), _timer()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(float(begin.elapsed_time(end)) / 1000)
    return min(seconds)


def _timer() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
