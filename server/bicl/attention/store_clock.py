"""How long storing keys and values holds a step up: the part of reordering that nothing hides."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from functools import partial

import torch

__all__ = ["StoreClock", "StoreSpan"]


@dataclass(frozen=True)
class StoreSpan:
    """Two events on the device around one layer's store."""

    begin: torch.cuda.Event
    end: torch.cuda.Event

    @property
    def ended(self) -> bool:
        return bool(self.end.query())  # type: ignore[no-untyped-call]

    @property
    def seconds(self) -> float:
        return float(self.begin.elapsed_time(self.end)) / 1000


class StoreClock:
    """Times one layer's store in every step; all layers together take that many times as long.

    On a GPU two events enclose the store, on the stream itself: whatever they are apart, the
    attention behind them waited, be it for the kernel or for the host to launch it. In a CUDA graph
    the events are nodes of the graph and every replay is timed. Between them nothing overlaps, so
    the timed layer gives up what the others may gain by programmatic launches: what is told is the
    most that can be exposed. Costs a few microseconds a step.

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
        self._host_seconds = 0.0
        self._span: StoreSpan | None = None
        self._free: list[StoreSpan] = []
        self._running: deque[tuple[StoreSpan, bool]] = deque()  # True: a graph's own
        self._captured: StoreSpan | None = None

    def begin(self) -> None:
        if not self._on_device:
            self._began = time.perf_counter()
            return
        if torch.cuda.is_current_stream_capturing():
            self._span = self._captured = _span(external=True)
        else:
            self._span = self._free.pop() if self._free else _span()
        self._span.begin.record()

    def end(self) -> None:
        if not self._on_device:
            self._host_seconds += time.perf_counter() - self._began
            return
        assert self._span is not None
        self._span.end.record()
        if self._span is not self._captured:
            self._running.append((self._span, False))

    def captured(self) -> StoreSpan | None:
        """The span that went into the graph captured last."""
        span, self._captured = self._captured, None
        return span

    def replayed(self, span: StoreSpan | None) -> None:
        """The graph that ``span`` is part of was launched."""
        if span is not None:
            self._running.append((span, True))

    def take(self) -> float:
        """Seconds of all layers' stores that ended since the last call. Waits for nothing: what
        still runs is told by a later call."""
        seconds, self._host_seconds = self._host_seconds, 0.0
        while self._running and self._running[0][0].ended:
            span, is_graphs = self._running.popleft()
            seconds += span.seconds
            if not is_graphs:
                self._free.append(span)
        return seconds * self._num_layers


def _span(*, external: bool = False) -> StoreSpan:
    make = partial(torch.cuda.Event, enable_timing=True, external=external)
    begin, end = make(), make()
    return StoreSpan(begin, end)
