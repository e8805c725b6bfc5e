"""Which cached item leaves first. One policy object orders the items of one store."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

__all__ = ["POLICIES", "EvictionPolicy", "Lru", "make_policy"]

K = TypeVar("K", bound=Hashable)


class EvictionPolicy(Protocol[K]):
    """An order of items. The store calls ``touch`` for every use after the first.

    A store whose items depend on one another (pages of a chain) takes the first candidate's last
    dependent in its place, so a policy need not know of chains.
    """

    def add(self, item: K) -> None:
        """A new item."""

    def touch(self, item: K) -> None:
        """An item was used."""

    def discard(self, item: K) -> None:
        """An item left, evicted or otherwise. Unknown items are ignored."""

    def candidates(self) -> Iterator[K]:
        """All items, those to evict first first. Not to be used after a change."""


class Lru:
    """Least recently used first."""

    def __init__(self, capacity: int) -> None:
        self._items: OrderedDict[Hashable, None] = OrderedDict()

    def add(self, item: Hashable) -> None:
        self._items[item] = None
        self._items.move_to_end(item)

    def touch(self, item: Hashable) -> None:
        self._items.move_to_end(item)

    def discard(self, item: Hashable) -> None:
        self._items.pop(item, None)

    def candidates(self) -> Iterator[Hashable]:
        return iter(self._items)


POLICIES: Mapping[str, Callable[[int], EvictionPolicy[Any]]] = {"lru": Lru}
"""Name to a policy for a store of so many items."""


def make_policy(name: str, capacity: int) -> EvictionPolicy[Any]:
    """A policy by its name in ``POLICIES``."""
    return POLICIES[name](capacity)
