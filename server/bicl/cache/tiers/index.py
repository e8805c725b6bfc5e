"""Which blocks a tier holds, and which of them leaves first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from bicl.cache.policy import EvictionPolicy

__all__ = ["USED_CHAINS", "Block", "BlockIndex"]

USED_CHAINS = 256
"""Uses above a tier that it remembers until something must leave: bounds that moment's work."""


@dataclass(slots=True, eq=False)
class Block:
    """One page of tokens in a tier.

    Attributes:
        key: its chain key.
        parent: key of the page before it, or of the namespace's root. The disk tier knows only
            the first bytes of it after a restart.
        ids: its packed token ids, compared on a hit; empty where they are not in memory.
        group: adapter that computed it.
        place: slot in host memory, or bytes on disk.
        leases: copies that are reading it; it stays until they end.
        pinned_until: it is not evicted before, in seconds of the tiers' clock.
        from_disk: it was read from disk and not used since.
        used_at: when it was used last, in seconds of the tiers' clock.
    """

    key: bytes
    parent: bytes
    ids: bytes
    group: str
    place: int
    leases: int = 0
    pinned_until: float = 0.0
    from_disk: bool = False
    used_at: float = 0.0


class BlockIndex:
    """Blocks of one tier by key. A block leaves before those that it follows.

    Args:
        policy: order of eviction, over keys.
        clock: seconds that only grow.
        parent_bytes: leading bytes of a parent's key that are known.
    """

    def __init__(
        self,
        policy: EvictionPolicy[bytes],
        clock: Callable[[], float],
        parent_bytes: int = 32,
    ) -> None:
        self._policy = policy
        self._clock = clock
        self._parent_bytes = parent_bytes
        self._blocks: dict[bytes, Block] = {}
        self._children: dict[bytes, dict[bytes, None]] = {}  # by the parent's leading bytes

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks.values())

    def get(self, key: bytes) -> Block | None:
        return self._blocks.get(key)

    def add(self, block: Block) -> None:
        self._blocks[block.key] = block
        block.used_at = self._clock()
        self._children.setdefault(block.parent[: self._parent_bytes], {})[block.key] = None
        self._policy.touch(block.key)

    def remove(self, block: Block) -> None:
        del self._blocks[block.key]
        self._policy.discard(block.key)
        parent = block.parent[: self._parent_bytes]
        siblings = self._children[parent]
        del siblings[block.key]
        if not siblings:
            del self._children[parent]

    def touch(self, blocks: Iterable[Block]) -> None:
        """Blocks of one chain were used, given first to last."""
        now = self._clock()
        for block in reversed(list(blocks)):
            block.used_at = now
            self._policy.touch(block.key)

    def victim(self, may_leave: Callable[[Block], bool]) -> Block | None:
        """The block to evict next: the end of the chain that the policy's first candidate is in.
        None if nothing may leave."""
        kept = []
        found = None
        for key in self._policy.candidates():
            block = self._blocks[self._end_of_chain(key)]
            if may_leave(block):
                found = block
                break
            kept.append(key)
        for key in kept:  # in use or pinned: not to be looked at again with every victim
            self._policy.postpone(key)
        return found

    def age(self, block: Block) -> float:
        """Seconds since a block was used last."""
        return self._clock() - block.used_at

    def _end_of_chain(self, key: bytes) -> bytes:
        for _ in range(len(self._blocks)):  # names on a disk could claim a ring
            children = self._children.get(key[: self._parent_bytes])
            if not children:
                break
            key = next(iter(children))
        return key
