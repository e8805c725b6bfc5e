"""Moves pages between a pool and host memory. Here: the contract, and the CPU's way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from bicl.cache.tiers.arena import HostArena
from bicl.cache.tiers.twins import PageTwins

__all__ = ["Copy", "Done", "HostMover", "PageMover", "Piece", "place_pieces"]


class Copy(Protocol):
    """Copies that were issued together."""

    def wait(self) -> None:
        """Block the calling thread until they ended."""

    def join(self) -> None:
        """Order what the calling thread issues from now on after them."""

    def exposed_seconds(self) -> float | None:
        """How long the work that ``join`` held up waited; None while that is not known."""


class PageMover(Protocol):
    """Copies whole pages of a pool's layers.

    A layer has one or more tensors whose first dim is the page: its keys and values, and whatever
    is kept beside them. A page's part of each is one contiguous piece; in a slot all pieces lie
    back to back, layer after layer.

    ``save`` and ``load`` only issue the copies. Background threads call them, and ``save`` also who
    claims pages whose copies have not begun, perhaps both at once; ``mark`` and ``join`` are called
    by the thread that issues the computation.

    Attributes:
        layer_bytes: bytes of one page in each layer.
        twins: where pages lie in a second page group's layers; None: there is none.
    """

    layer_bytes: tuple[int, ...]
    twins: PageTwins | None

    def mark(self) -> object:
        """A point behind everything that the calling thread has issued so far."""

    def save(
        self, pages: Sequence[int], arena: HostArena, slots: Sequence[int], after: object
    ) -> Copy:
        """Copy pages to slots, in all layers, once ``after`` is reached."""

    def load(
        self,
        layer: int,
        pages: Sequence[int],
        arena: HostArena,
        slots: Sequence[int],
        after: object,
    ) -> Copy:
        """Copy one layer's part of slots to pages, once ``after`` is reached."""


class Done:
    """Copies that ended before they were reported."""

    def wait(self) -> None:
        pass

    def join(self) -> None:
        pass

    def exposed_seconds(self) -> float | None:
        return 0.0


class HostMover:
    """For a pool in host memory, where the background thread itself copies.

    It copies with numpy: torch takes OpenMP threads for more than 32 KiB, keeps them for each
    thread that asked, and with more of them than cores the engine's go to sleep after every
    operation.

    Args:
        layers: each layer's tensors, contiguous, ``[num_pages, ...]``.
        twins: of a second page group.
    """

    def __init__(
        self, layers: Sequence[Sequence[torch.Tensor]], twins: PageTwins | None = None
    ) -> None:
        self.twins = twins
        self._pieces = place_pieces(layers)
        self.layer_bytes = tuple(sum(p.num_bytes for p in pieces) for pieces in self._pieces)
        self._rows = [[piece.rows.numpy() for piece in pieces] for pieces in self._pieces]

    def mark(self) -> object:
        return None

    def save(
        self, pages: Sequence[int], arena: HostArena, slots: Sequence[int], after: object
    ) -> Copy:
        places = [self._places(layer, pages) for layer in range(len(self._pieces))]
        for slot, *own in zip(slots, *places, strict=True):
            memory = arena.slot(slot).numpy()
            for page, pieces, tensors in zip(own, self._pieces, self._rows, strict=True):
                for piece, rows in zip(pieces, tensors, strict=True):
                    memory[piece.start : piece.end] = rows[page]
        return Done()

    def load(
        self,
        layer: int,
        pages: Sequence[int],
        arena: HostArena,
        slots: Sequence[int],
        after: object,
    ) -> Copy:
        memory = [arena.slot(slot).numpy() for slot in slots]
        places = self._places(layer, pages)
        for piece, rows in zip(self._pieces[layer], self._rows[layer], strict=True):
            for page, held in zip(places, memory, strict=True):
                rows[page] = held[piece.start : piece.end]
        return Done()

    def _places(self, layer: int, pages: Sequence[int]) -> Sequence[int]:
        """Where they lie in a layer."""
        if self.twins is None or layer not in self.twins.layers:
            return pages
        twins: list[int] = self.twins.of(pages).tolist()
        return twins


class Piece(NamedTuple):
    """A tensor's part of a page: bytes ``[num_pages, num_bytes]``, and where it lies in a slot."""

    rows: torch.Tensor
    start: int

    @property
    def num_bytes(self) -> int:
        return self.rows.shape[1]

    @property
    def end(self) -> int:
        return self.start + self.num_bytes


def place_pieces(layers: Sequence[Sequence[torch.Tensor]]) -> list[list[Piece]]:
    """Where each layer's pieces lie in a slot."""
    placed, start = [], 0
    for tensors in layers:
        pieces = []
        for tensor in tensors:
            pieces.append(Piece(tensor.flatten(1).view(torch.uint8), start))
            start = pieces[-1].end
        placed.append(pieces)
    return placed
