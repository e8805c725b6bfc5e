"""Prefixes that eviction must leave alone, for a time or until told otherwise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bicl.cache.keys import ID_BYTES, Namespace, PackedIds
from bicl.cache.radix import RadixIndex
from bicl.cache.radix_nodes import Node
from bicl.errors import CapacityError

__all__ = ["PinTable"]


@dataclass(frozen=True, slots=True)
class _Pin:
    node: Node
    expires: float


class PinTable:
    """Locks on prefixes in the index, each with an expiry.

    Args:
        index: where the prefixes are.
        max_pages: pages that pins may protect together, so that they cannot starve requests.
        clock: seconds that only grow.
    """

    def __init__(self, index: RadixIndex, max_pages: int, clock: Callable[[], float]) -> None:
        self.max_pages = max_pages
        self._index = index
        self._clock = clock
        self._pins: dict[tuple[Namespace, PackedIds], _Pin] = {}
        self._next_expiry = math.inf

    def __len__(self) -> int:
        return len(self._pins)

    def pin(self, ids: PackedIds, namespace: Namespace, ttl_seconds: float) -> int:
        """Pin the whole pages of ``ids`` that are cached; see :meth:`CacheManager.pin`."""
        self.expire()
        match = self._index.match(namespace, ids, len(ids) // ID_BYTES)
        if match is None or not match.pages:
            return 0
        self._refuse_above_limit(match.pages)
        node = self._index.lock_match(match)
        self.unpin(ids, namespace)
        expires = self._clock() + ttl_seconds
        self._pins[namespace, ids] = _Pin(node, expires)
        self._next_expiry = min(self._next_expiry, expires)
        return len(match.pages)

    def unpin(self, ids: PackedIds, namespace: Namespace) -> bool:
        """Take a pin off. False if there is none (never set, expired or flushed)."""
        pin = self._pins.pop((namespace, ids), None)
        if pin is None:
            return False
        self._index.unlock(pin.node, self._clock())
        return True

    def expire(self) -> None:
        """Take off the pins whose time is over."""
        now = self._clock()
        if now < self._next_expiry:
            return
        for (namespace, ids), pin in list(self._pins.items()):
            if pin.expires <= now:
                self.unpin(ids, namespace)
        self._next_expiry = min((pin.expires for pin in self._pins.values()), default=math.inf)

    def forget(self, namespace: Namespace) -> int:
        """Drop the pins of a namespace that has left the index. Returns how many."""
        gone = [key for key in self._pins if key[0] == namespace]
        for key in gone:
            del self._pins[key]
        return len(gone)

    def reset(self) -> None:
        """The index forgot everything."""
        self._pins.clear()
        self._next_expiry = math.inf

    def nodes(self) -> Iterator[Node]:
        """The node each pin locks."""
        return (pin.node for pin in self._pins.values())

    def pages(self) -> set[int]:
        """Pages under a pin."""
        return {page for lock in self.nodes() for node in lock.path() for page in node.pages}

    def _refuse_above_limit(self, pages: list[int]) -> None:
        total = len(self.pages().union(pages))
        if total > self.max_pages:
            raise CapacityError(
                f"pinning {len(pages)} pages would protect {total} of at most "
                f"{self.max_pages}; unpin other prefixes or raise max_pinned_pages"
            )
