"""The host tier's bookkeeping: which slot holds which block, and who still reads it.

Not thread-safe: :class:`bicl.cache.tiers.PageTiers` holds its lock around every call.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from bicl.cache.keys import PageChain
from bicl.cache.policy import DEFAULT_POLICY, make_policy
from bicl.cache.tags import PageTags
from bicl.cache.tiers.arena import HostArena
from bicl.cache.tiers.index import USED_CHAINS, Block, BlockIndex
from bicl.errors import CapacityError

__all__ = ["HostStore"]


class HostStore:
    """Blocks in host memory.

    A slot is tagged with its block's key once its bytes are complete, and every use compares the
    tag: a slot that was given away or never filled is not read.
    """

    def __init__(
        self,
        arena: HostArena,
        policy: str = DEFAULT_POLICY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.arena = arena
        self.tags = PageTags()
        self.evicted_pages = 0
        self.evicted_seconds = 0.0  # since their last use, summed
        self._clock = clock
        # Chains used in the pool; looked at only when something must leave.
        self.used_elsewhere: deque[Sequence[bytes]] = deque(maxlen=USED_CHAINS)
        self._free = list(range(arena.num_slots - 1, -1, -1))
        self._index = BlockIndex(make_policy(policy, arena.num_slots), clock)

    def __len__(self) -> int:
        return len(self._index)

    @property
    def num_free(self) -> int:
        """Slots that hold nothing."""
        return len(self._free)

    def get(self, key: bytes) -> Block | None:
        return self._index.get(key)

    def take_slot(self) -> int | None:
        """A slot to fill, after evicting a block if none is free; None if all are in use."""
        if not self._free:
            while self.used_elsewhere:
                found = (self._index.get(key) for key in self.used_elsewhere.popleft())
                self._index.touch(block for block in found if block is not None)
            now = self._clock()
            victim = self._index.victim(lambda b: not b.leases and b.pinned_until <= now)
            if victim is None:
                return None
            self.evicted_pages += 1
            self.evicted_seconds += self._index.age(victim)
            self.remove(victim)
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        """A slot that was taken holds nothing."""
        self._free.append(slot)

    def add(self, block: Block) -> None:
        """The block's slot is filled."""
        self.tags.write([block.place], [block.key])
        self._index.add(block)

    def remove(self, block: Block) -> None:
        """Forget a block; its slot is free when nobody reads it any more."""
        self._index.remove(block)
        if not block.leases:
            self._empty(block)

    def lease(self, block: Block) -> None:
        """Keep a block's slot until :meth:`release`."""
        block.leases += 1

    def release(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            block.leases -= 1
            if not block.leases and self._index.get(block.key) is not block:
                self._empty(block)

    def _empty(self, block: Block) -> None:
        self.tags.clear([block.place])
        self._free.append(block.place)

    def match(self, chain: PageChain, first: int, last: int) -> list[Block]:
        """Blocks of the chain's pages ``first .. last``, as far as all are held."""
        found: list[Block] = []
        for page in range(first, last):
            block = self._index.get(chain.key(page))
            if block is None or block.ids != chain.ids(page) or block.parent != chain.key(page - 1):
                break
            found.append(block)
        return found

    def touch(self, blocks: list[Block]) -> None:
        self._index.touch(blocks)

    def pin(self, blocks: Sequence[Block], until: float) -> None:
        """Do not evict these blocks before ``until``.

        Raises:
            CapacityError: pins would protect more than half of the slots.
        """
        now, limit = self._clock(), self.arena.num_slots // 2
        names = {block.key for block in blocks}
        others = sum(b.pinned_until > now and b.key not in names for b in self._index)
        if others + len(blocks) > limit:
            raise CapacityError(
                f"pinning {len(blocks)} pages in host memory would protect {others + len(blocks)} "
                f"of at most {limit}; unpin other prefixes or give the host cache more"
            )
        for block in blocks:
            block.pinned_until = until

    def unpin(self, keys: Iterable[bytes]) -> bool:
        """Take pins off. False: there were none."""
        found, now = False, self._clock()
        for block in (self._index.get(key) for key in keys):
            if block is not None and block.pinned_until > now:
                block.pinned_until, found = 0.0, True
        return found

    def flush(self, group: str | None) -> int:
        """Forget every block, or one group's. Returns how many."""
        gone = [block for block in self._index if group in (None, block.group)]
        for block in gone:
            self.remove(block)
        return len(gone)

    def check(self) -> bool:
        """Every slot is free, held by one block, or still read after its block was removed."""
        held = {block.place for block in self._index}
        free = set(self._free)
        return len(held) == len(self._index) and len(free) == len(self._free) and not held & free
