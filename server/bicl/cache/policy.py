"""Which cached item leaves first. One policy object orders the items of one store."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

__all__ = ["DEFAULT_POLICY", "POLICIES", "EvictionPolicy", "LfuAged", "Lru", "make_policy"]

K = TypeVar("K", bound=Hashable)


class EvictionPolicy(Protocol[K]):
    """An order of items.

    A store whose items depend on one another (pages of a chain) takes the first candidate's last
    dependent in its place, or touches dependents first, so a policy need not know of chains.
    """

    def touch(self, item: K) -> None:
        """An item was used, a new one for the first time. A candidate from now on."""

    def hold(self, item: K) -> None:
        """An item is in use and no candidate until it is touched. It may be new."""

    def inherit(self, item: K, other: K) -> None:
        """A new item was a part of another one until now. It is held."""

    def postpone(self, item: K) -> None:
        """An item may not leave now: do not name it first again soon. No use of it."""

    def discard(self, item: K) -> None:
        """An item left, evicted or otherwise. Unknown items are ignored."""

    def candidates(self) -> Iterator[K]:
        """All items, those to evict first first. Asked for when something must leave; not to be
        used after a change."""


class Lru:
    """Least recently used first."""

    def __init__(self, capacity: int) -> None:
        self._items: OrderedDict[Hashable, None] = OrderedDict()

    def touch(self, item: Hashable) -> None:
        self._items[item] = None
        self._items.move_to_end(item)

    def hold(self, item: Hashable) -> None:
        self._items.pop(item, None)

    def inherit(self, item: Hashable, other: Hashable) -> None:
        pass

    def postpone(self, item: Hashable) -> None:
        self._items.move_to_end(item)

    def discard(self, item: Hashable) -> None:
        self._items.pop(item, None)

    def candidates(self) -> Iterator[Hashable]:
        return iter(self._items)


class LfuAged:
    """Least frequently used first; uses long ago count for less and less.

    An item's rank is how often it was used plus the rank at which the last item left when it was
    used last, so that what was used often once is overtaken by what is used now (LFU with dynamic
    ageing). Among equals the least recently used leaves.
    """

    def __init__(self, capacity: int) -> None:
        self._uses: dict[Hashable, int] = {}
        self._entries: dict[Hashable, _Entry] = {}
        self._heap: list[_Entry] = []  # of valid and outdated entries
        self._numbers = itertools.count()
        self._floor = 0

    def touch(self, item: Hashable) -> None:
        uses = self._uses[item] = self._uses.get(item, 0) + 1
        self._enter(item, self._floor + uses)

    def hold(self, item: Hashable) -> None:
        self._entries.pop(item, None)

    def inherit(self, item: Hashable, other: Hashable) -> None:
        self._uses[item] = self._uses.get(other, 0)

    def postpone(self, item: Hashable) -> None:
        self._enter(item, self._floor + self._uses[item] + 1)

    def discard(self, item: Hashable) -> None:
        self._uses.pop(item, None)
        self._entries.pop(item, None)

    def candidates(self) -> Iterator[Hashable]:
        named: list[_Entry] = []
        try:
            while self._heap:
                entry = heapq.heappop(self._heap)
                if self._entries.get(entry.item) is not entry:
                    continue
                if not named:
                    self._floor = max(self._floor, entry.rank)
                named.append(entry)
                yield entry.item
        finally:
            for entry in named:
                heapq.heappush(self._heap, entry)

    def _enter(self, item: Hashable, rank: int) -> None:
        entry = _Entry(rank, next(self._numbers), item)
        self._entries[item] = entry
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)


class _Entry(NamedTuple):
    rank: int
    number: int
    item: Hashable


POLICIES: Mapping[str, Callable[[int], EvictionPolicy[Any]]] = {
    "lru": Lru,
    "lfu-aged": LfuAged,
}
"""Name to a policy for a store of so many items."""

DEFAULT_POLICY = "lfu-aged"
"""Hits more than LRU on every public trace and at every size tried (``docs/reuse.md``)."""


def make_policy(name: str, capacity: int) -> EvictionPolicy[Any]:
    """A policy by its name in ``POLICIES``."""
    return POLICIES[name](capacity)
