"""Moves pages between a pool and host memory. Here: the contract, and the CPU's way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from bicl.cache.tiers.arena import HostArena

__all__ = ["Copy", "HostMover", "PageMover"]


class Copy(Protocol):
    """Copies that were issued together."""

    def wait(self) -> None:
        """Block the calling thread until they ended."""

    def join(self) -> None:
        """Order what the calling thread issues from now on after them."""

    def exposed_seconds(self) -> float | None:
        """How long the work that ``join`` held up waited; None while that is not known."""


class PageMover(Protocol):
    """Copies whole pages of a pool's layers, each layer's part in one piece.

    ``save`` and ``load`` are called by background threads and only issue the copies; ``mark`` and
    ``join`` by the thread that issues the computation.

    Attributes:
        layer_bytes: bytes of one page in each layer; in a slot the layers lie back to back.
    """

    layer_bytes: tuple[int, ...]

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


class _Done:
    """Copies that ended before they were reported."""

    def wait(self) -> None:
        pass

    def join(self) -> None:
        pass

    def exposed_seconds(self) -> float | None:
        return 0.0


class HostMover:
    """For a pool in host memory, where the background thread itself copies.

    Args:
        layers: each layer's pages, ``[num_pages, ...]``, contiguous.
    """

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        self._layers = [pages.flatten(1).view(torch.uint8) for pages in layers]
        self.layer_bytes = tuple(pages.shape[1] for pages in self._layers)
        self._offsets = layer_offsets(self.layer_bytes)

    def mark(self) -> object:
        return None

    def save(
        self, pages: Sequence[int], arena: HostArena, slots: Sequence[int], after: object
    ) -> Copy:
        for page, slot in zip(pages, slots, strict=True):
            target = arena.slot(slot)
            for layer, (start, end) in zip(self._layers, self._offsets, strict=True):
                target[start:end].copy_(layer[page])
        return _Done()

    def load(
        self,
        layer: int,
        pages: Sequence[int],
        arena: HostArena,
        slots: Sequence[int],
        after: object,
    ) -> Copy:
        start, end = self._offsets[layer]
        target = self._layers[layer]
        for page, slot in zip(pages, slots, strict=True):
            target[page].copy_(arena.slot(slot)[start:end])
        return _Done()


def layer_offsets(layer_bytes: Sequence[int]) -> list[tuple[int, int]]:
    """Where each layer's part begins and ends in a slot."""
    offsets, start = [], 0
    for size in layer_bytes:
        offsets.append((start, start + size))
        start += size
    return offsets
