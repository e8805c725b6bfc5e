"""Which prefixes are cached, in the pool and below it: the index, the pages' tags, the tiers.

Pages in the pool are found by their ids in the radix index and trusted by their tags; what follows
them is found below by chain keys. Whoever calls holds the sequences.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from enum import Enum

from bicl.cache.allocator import PageAllocator
from bicl.cache.arrivals import Arrivals
from bicl.cache.keys import ID_BYTES, Namespace, PackedIds, PageChain
from bicl.cache.radix import RadixIndex
from bicl.cache.radix_nodes import Match, Node
from bicl.cache.stats import CacheStats
from bicl.cache.tags import PageTags
from bicl.cache.tiers import Promotion, Reservation

__all__ = ["Prefixes", "Saving"]

MEMORY = 1 << 17
"""Pages whose keys are remembered after they left, to tell lost pages from new ones; 100 bytes
each, roughly."""


class Saving(Enum):
    """Which of a sequence's full pages go to the tiers: those that the index did not hold (what it
    holds was saved when it came), all of them, or none."""

    NEW = "new"
    ALL = "all"
    NONE = "none"


class Prefixes:
    """Finds, adds and evicts cached prefixes.

    Args:
        index: of the pool's pages.
        allocator: counts a reference for every page in the index.
        arrivals: the tiers below; None: there are none.
        min_copy_tokens: least gain for which part of a page is copied.
        stats: counts here.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        index: RadixIndex,
        allocator: PageAllocator,
        arrivals: Arrivals | None,
        min_copy_tokens: int,
        stats: CacheStats,
        clock: Callable[[], float],
    ) -> None:
        self.index = index
        self.tags = PageTags()
        self.arrivals = arrivals
        self.min_copy_tokens = min_copy_tokens
        self._allocator = allocator
        self._stats = stats
        self._clock = clock
        self._unsound: set[int] = set()  # indexed pages found without their tag
        self._last_match: tuple[bytes, Namespace, int, int, Match | None] | None = None
        # Keys of pages ever added, the last MEMORY of them. (A plain dict finds its first entry
        # slower the more were deleted before it.)
        self._computed: OrderedDict[bytes, None] = OrderedDict()

    # --- find --------------------------------------------------------------------------------
    def match(self, ids: bytes, namespace: Namespace, max_tokens: int) -> Match | None:
        """The longest prefix of at most ``max_tokens`` tokens in the pool whose pages carry their
        tags; None if there is none."""
        match = self._in_index(ids, namespace, max_tokens)
        if match is None:
            return None
        sound = self.tags.num_verified(match.pages, match.keys)
        if sound < len(match.pages):
            self._distrust(match.pages[sound])
            return match.first(sound)
        partial = match.partial
        if partial and partial.num_tokens >= self.min_copy_tokens:
            if self.tags.get(partial.page) == partial.key:
                return match
            self._distrust(partial.page)
        return match._replace(partial=None)

    def reserve(
        self, ids: bytes, namespace: Namespace, match: Match | None, max_tokens: int
    ) -> Reservation | None:
        """What host memory holds of the prefix beyond ``match`` and is worth fetching."""
        if self.arrivals is None:
            return None
        chain, first = self._beyond(ids, namespace, match)
        return self.arrivals.reserve(chain, first, max_tokens * ID_BYTES // self.index.page_bytes)

    def host_holds_more(
        self, ids: bytes, namespace: Namespace, match: Match | None, max_tokens: int
    ) -> bool:
        """Whether host memory holds the page that follows ``match``."""
        if self.arrivals is None:
            return False
        chain, first = self._beyond(ids, namespace, match)
        last = max_tokens * ID_BYTES // self.index.page_bytes
        return first < last and self.arrivals.tiers.num_in_host(chain, first, first + 1) > 0

    def promote(
        self, ids: bytes, namespace: Namespace, match: Match | None, max_tokens: int
    ) -> Promotion | None:
        """Bring what only the disk holds beyond ``match`` nearer, if that pays."""
        if self.arrivals is None:
            return None
        chain, first = self._beyond(ids, namespace, match)
        return self.arrivals.promote(chain, first, max_tokens * ID_BYTES // self.index.page_bytes)

    def count_blocks(
        self, ids: bytes, namespace: Namespace, match: Match | None, arriving: int, max_tokens: int
    ) -> None:
        """Count a prompt's pages that were computed before: those held, and those held no more."""
        chain, first = self._beyond(ids, namespace, match)
        page, last = first + arriving, max_tokens * ID_BYTES // self.index.page_bytes
        self._stats.block_hits += page
        while page < last and chain.key(page) in self._computed:
            self._stats.block_misses += 1
            page += 1

    def pin_below(self, ids: bytes, namespace: Namespace, first: int, ttl_seconds: float) -> int:
        """Pin what host memory holds from page ``first`` on. Returns how many pages."""
        if self.arrivals is None:
            return 0
        chain = self._chain(ids, [self.index.root_key(namespace)], 0, namespace)
        return self.arrivals.tiers.pin(chain, first, chain.num_pages, ttl_seconds)

    def unpin_below(self, ids: bytes, namespace: Namespace) -> bool:
        """Take pins off in host memory. False: there were none."""
        if self.arrivals is None:
            return False
        chain = self._chain(ids, [self.index.root_key(namespace)], 0, namespace)
        return self.arrivals.tiers.unpin(chain)

    # --- add ---------------------------------------------------------------------------------
    def add(
        self,
        node: Node,
        ids: bytes,
        pages: list[int],
        namespace: Namespace,
        saving: Saving = Saving.NEW,
    ) -> Node:
        """Pages that are full now, after ``node``, on which the caller has a lock. Pages that the
        index holds already stay the caller's alone. Returns where the lock is now.
        """
        if self._unsound:
            self._heal(node, ids, pages)
        node, present, dropped = self.index.insert(node, ids, pages)
        new = pages[present:]
        self._allocator.retain(new)
        self._allocator.release(dropped)
        self._stats.duplicate_pages += present
        keys = self.index.last_keys(node, len(pages) + 1)
        if new:
            added = keys[present + 1 :]
            self.tags.write(new, added)
            self._computed.update(dict.fromkeys(added))
            while len(self._computed) > MEMORY:
                self._computed.popitem(last=False)
        if self.arrivals is not None and saving is not Saving.NONE:
            first = present if saving is Saving.NEW else 0
            self.arrivals.tiers.save(self._chain(ids, keys, 0, namespace), pages[first:], first)
        return node

    def add_partial(self, node: Node, ids: bytes, page: int) -> None:
        """A last page that is not full, for copies of it, if that is worth a page."""
        if len(ids) < self.min_copy_tokens * ID_BYTES:
            return
        inserted = self.index.insert_partial(node, ids, page, self._clock())
        if inserted is not None:
            self._allocator.retain([page])
            self._allocator.release(inserted.dropped)
            self.tags.write([page], inserted.node.keys)

    # --- take away ---------------------------------------------------------------------------
    def evict(self, num_pages: int) -> None:
        """Make up to so many pages free."""
        now = self._clock()
        for pages, last_used in self.index.evict(num_pages):
            self._allocator.release(pages)
            self._stats.evicted_pages += len(pages)
            self._stats.evicted_age_ms += len(pages) * int(1000 * (now - last_used))

    def reset(self) -> None:
        """The index and the allocator forgot everything; what the tiers hold stays."""
        self.tags.clear_all()
        self._unsound.clear()

    def forget_computed(self) -> None:
        """Weights changed: nothing was computed before."""
        self._computed.clear()

    def claim(self, pages: Iterable[int]) -> None:
        """These pages are handed out to be written."""
        pages = list(pages)
        self.tags.clear(pages)
        self._unsound.difference_update(pages)
        if self.arrivals is not None:
            self.arrivals.tiers.claim(pages)

    # --- inside ------------------------------------------------------------------------------
    def _in_index(self, ids: bytes, namespace: Namespace, max_tokens: int) -> Match | None:
        """What the index finds. A prompt is sought for the tiers and again when it is admitted:
        the second time, nothing changed in between, the answer is known."""
        asked = (namespace, max_tokens, self.index.version)
        last = self._last_match
        if last is not None and last[0] is ids and last[1:4] == asked:
            return last[4]
        match = self.index.match(namespace, ids, max_tokens)
        self._last_match = (ids, *asked, match)
        return match

    def _distrust(self, page: int) -> None:
        """An indexed page lacks its tag: its tokens are computed again, into another page."""
        if page not in self._unsound:
            self._unsound.add(page)
            self._stats.tag_mismatches += 1

    def _heal(self, node: Node, ids: bytes, pages: list[int]) -> None:
        """Put what was computed anew in the place of indexed pages that were found unsound."""
        for old, new, key in self.index.replace(node, ids, self._unsound, pages):
            self._allocator.retain([new])
            self._allocator.release([old])
            self._unsound.discard(old)
            self.tags.write([new], [key])

    def _beyond(
        self, ids: bytes, namespace: Namespace, match: Match | None
    ) -> tuple[PageChain, int]:
        """The chain of a prompt, and its first page that ``match`` does not bring."""
        first = len(match.pages) if match else 0
        key = match.keys[-1] if match and match.keys else self.index.root_key(namespace)
        return self._chain(ids, [key], first, namespace), first

    def _chain(self, ids: bytes, keys: list[bytes], start: int, namespace: Namespace) -> PageChain:
        return PageChain(
            PackedIds(ids),
            self.index.page_bytes // ID_BYTES,
            keys,
            start=start,
            group=namespace.adapter_id,
            hash_function=self.index.hash_function,
        )
