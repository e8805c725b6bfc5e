"""Moves pages between a GPU's pool and page-locked host memory, beside the computation."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from bicl.cache.tiers import Copy, HostMover, PageMover, PageTwins
from bicl.cache.tiers.arena import HostArena
from bicl.cache.tiers.mover import place_pieces
from bicl.ops.cuda.transfer_pages import transfer_pages

__all__ = ["CudaMover", "make_mover"]

Addresses: TypeAlias = npt.NDArray[np.int64]


def make_mover(
    layers: Sequence[Sequence[torch.Tensor]], twins: PageTwins | None = None
) -> PageMover:
    """The mover for a pool's device.

    Args:
        layers: each layer's tensors, contiguous, ``[num_pages, ...]``: its pages, and what is kept
            beside them.
        twins: of a second page group.
    """
    if layers[0][0].device.type == "cuda":
        return CudaMover(layers, twins)
    return HostMover(layers, twins)


class CudaMover:
    """``PageMover`` on the copy engines: one stream each way, both beside the computation's."""

    def __init__(
        self, layers: Sequence[Sequence[torch.Tensor]], twins: PageTwins | None = None
    ) -> None:
        self.twins = twins
        placed = place_pieces(layers)
        self.layer_bytes = tuple(sum(p.num_bytes for p in pieces) for pieces in placed)
        pieces = [piece for of_layer in placed for piece in of_layer]
        ends = np.cumsum([len(of_layer) for of_layer in placed]).tolist()
        self._of_layer = [slice(a, b) for a, b in pairwise([0, *ends])]
        second = frozenset() if twins is None else twins.layers
        of_second = [layer in second for layer, of_layer in enumerate(placed) for _ in of_layer]
        self._in_second = np.array(of_second)[:, None]
        self._bytes = np.array([[piece.num_bytes] for piece in pieces], dtype=np.int64)
        self._bases = np.array([[piece.rows.data_ptr()] for piece in pieces], dtype=np.int64)
        self._starts = np.array([[piece.start] for piece in pieces], dtype=np.int64)
        self._tensors = layers  # their memory must outlive the addresses
        self._device = layers[0][0].device
        self._out = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._in = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def mark(self) -> object:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def save(
        self, pages: Sequence[int], arena: HostArena, slots: Sequence[int], after: object
    ) -> Copy:
        every = slice(None)
        here, there = self._on_device(every, pages), self._on_host(every, arena, slots)
        return self._issue(self._out, here, there, self._bytes, after)

    def load(
        self,
        layer: int,
        pages: Sequence[int],
        arena: HostArena,
        slots: Sequence[int],
        after: object,
    ) -> Copy:
        pieces = self._of_layer[layer]
        there, here = self._on_host(pieces, arena, slots), self._on_device(pieces, pages)
        return self._issue(self._in, there, here, self._bytes[pieces], after)

    def _on_device(self, pieces: slice, pages: Sequence[int]) -> Addresses:
        """``[pieces, pages]``"""
        places = np.asarray(pages, dtype=np.int64)
        if self.twins is not None:
            places = np.where(self._in_second[pieces], self.twins.of(pages), places)
        return self._bases[pieces] + self._bytes[pieces] * places

    def _on_host(self, pieces: slice, arena: HostArena, slots: Sequence[int]) -> Addresses:
        """``[pieces, slots]``"""
        return self._starts[pieces] + arena.addresses[np.asarray(slots, dtype=np.int64)]

    def _issue(
        self,
        stream: torch.cuda.Stream,
        sources: Addresses,
        targets: Addresses,
        piece_bytes: Addresses,
        after: object,
    ) -> Copy:
        assert isinstance(after, torch.cuda.Event)
        sizes = np.repeat(piece_bytes, sources.shape[1])
        with torch.cuda.device(self._device):
            stream.wait_event(after)
            transfer_pages(sources.ravel(), targets.ravel(), sizes, stream)
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            done.record(stream)
        return _CudaCopy(done, self._device)


class _CudaCopy:
    """Copies whose end is an event."""

    def __init__(self, done: torch.cuda.Event, device: torch.device) -> None:
        self._done = done
        self._device = device
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def wait(self) -> None:
        self._done.synchronize()

    def join(self) -> None:
        stream = torch.cuda.current_stream(self._device)
        before, behind = _timer(), _timer()
        before.record(stream)
        stream.wait_event(self._done)
        behind.record(stream)
        self._waits.append((before, behind))

    def exposed_seconds(self) -> float | None:
        if not all(behind.query() for _, behind in self._waits):  # type: ignore[no-untyped-call]
            return None
        return sum(float(before.elapsed_time(behind)) for before, behind in self._waits) / 1000


def _timer() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
