"""One pool's pages: which are free, cached, pinned or held, and which prefixes may be reused.

What sequences do with them is :class:`bicl.cache.manager.CacheManager`'s.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from bicl.cache.allocator import PageAllocator
from bicl.cache.arrivals import Arrivals
from bicl.cache.integrity import check_counts, check_index
from bicl.cache.keys import (
    HashFunction,
    Namespace,
    PackedIds,
    TokenIds,
    pack_ids,
    root_key,
    sha256,
)
from bicl.cache.pins import PinTable
from bicl.cache.policy import DEFAULT_POLICY
from bicl.cache.prefixes import Prefixes
from bicl.cache.radix import RadixIndex
from bicl.cache.sequence import SequencePages
from bicl.cache.stats import CacheGauges, CacheStats, FlushReport
from bicl.cache.tags import PageTags
from bicl.cache.tiers import PageTiers
from bicl.errors import CapacityError, ConfigError, InvalidInputError

__all__ = ["BASE", "PageAccounts"]

BASE = Namespace()
"""No salt, no adapter."""


class PageAccounts:
    """Pages, prefixes and their accounting for one pool.

    Args:
        num_pages: pages of the pool.
        page_size: tokens a page.
        reserved_pages: pages at the front that are never handed out.
        prefix_cache: False switches all reuse off.
        model_revision: names the weights; part of every page's key.
        min_copy_tokens: least gain for which part of a page is copied. A copy moves a whole page
            in every layer; a few more tokens in a prefill that runs anyway are cheaper.
        max_pinned_pages: pages that pins may protect together; default half the usable ones.
        tiers: where full pages are saved to and come back from. The manager calls it on the
            thread, and with the stream, on which the pages are computed.
        eviction_policy: which prefix leaves the pool first, by name.
        clock: seconds that only grow, for expiry and ages.
        hash_function: names pages. Lookups compare token ids and do not depend on it.

    Raises:
        ConfigError: a value that cannot work.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        reserved_pages: int = 0,
        prefix_cache: bool = True,
        model_revision: str = "",
        min_copy_tokens: int = 16,
        max_pinned_pages: int | None = None,
        tiers: PageTiers | None = None,
        eviction_policy: str = DEFAULT_POLICY,
        clock: Callable[[], float] = time.monotonic,
        hash_function: HashFunction = sha256,
    ) -> None:
        if page_size < 1:
            raise ConfigError(f"page_size is {page_size}; at least 1 is needed")
        if min_copy_tokens < 1:
            raise ConfigError(f"min_copy_tokens is {min_copy_tokens}; at least 1 is needed")
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self.min_copy_tokens = min_copy_tokens
        self.stats = CacheStats()
        self._clock = clock
        self._allocator = PageAllocator(num_pages, reserved_pages)
        self._index = RadixIndex(
            page_size,
            lambda space: root_key(space, model_revision, hash_function),
            hash_function,
            eviction_policy,
        )
        if max_pinned_pages is None:
            max_pinned_pages = self.usable_pages // 2
        self._pins = PinTable(self._index, max_pinned_pages, clock)
        self._arrivals = None if tiers is None else Arrivals(tiers, self._allocator)
        self._prefixes = Prefixes(
            self._index, self._allocator, self._arrivals, min_copy_tokens, self.stats, clock
        )
        self._live: set[SequencePages] = set()

    @property
    def tags(self) -> PageTags:
        """What each page is known to hold."""
        return self._prefixes.tags

    # --- sizes -------------------------------------------------------------------------------
    @property
    def usable_pages(self) -> int:
        """Pages that can be handed out."""
        return self._allocator.usable_pages

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest sequence that can ever fit. Refuse longer ones at the edge."""
        return self.usable_pages * self.page_size

    @property
    def available_pages(self) -> int:
        """Pages that could be handed out now: free ones and those that may be evicted."""
        self._settle()
        return self._allocator.num_free + self._index.num_evictable_pages

    @property
    def has_tiers(self) -> bool:
        """Pages can come from outside the pool."""
        return self._arrivals is not None

    @property
    def waits_for_copies(self) -> bool:
        """Pages will come free when copies that were given up have ended."""
        return self._arrivals is not None and bool(self._arrivals.abandoned_pages)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that ``num_tokens`` tokens occupy."""
        return -(-num_tokens // self.page_size)

    def gauges(self) -> CacheGauges:
        """Where every page is now."""
        self._settle()
        references = self._allocator.references
        pinned = sum(references(page) == 1 for page in self._pins.pages())
        free, cached = self._allocator.num_free, self._index.num_evictable_pages
        abandoned = len(self._arrivals.abandoned_pages) if self._arrivals else 0
        return CacheGauges(
            free_pages=free,
            cached_pages=cached,
            pinned_pages=pinned,
            in_use_pages=self.usable_pages - free - cached - pinned - abandoned,
            loading_pages=abandoned,
            reserved_pages=self._allocator.reserved_pages,
        )

    # --- prefixes ----------------------------------------------------------------------------
    def pin(
        self, token_ids: TokenIds, namespace: Namespace = BASE, ttl_seconds: float | None = None
    ) -> int:
        """Protect the cached whole pages of a prefix from eviction: those in the pool, and those
        that follow them in host memory.

        Pinning the same tokens again renews the time and covers what was cached since.

        Args:
            token_ids: the prefix, computed before by some sequence.
            namespace: whose prefix it is.
            ttl_seconds: how long; None is until ``unpin`` or ``flush``.

        Returns:
            Tokens protected; 0 if the prefix is not cached, and then there is no pin.

        Raises:
            CapacityError: pins would protect more than ``max_pinned_pages``, or than half of host
                memory.
            InvalidInputError: ``ttl_seconds`` is not positive.
        """
        if ttl_seconds is not None and not ttl_seconds > 0:
            raise InvalidInputError(f"ttl_seconds is {ttl_seconds}; a positive time is needed")
        ttl = math.inf if ttl_seconds is None else ttl_seconds
        ids = pack_ids(token_ids)
        pages = self._pin_in_pool(ids, namespace, ttl)
        below = self._prefixes.pin_below(ids, namespace, pages, ttl)
        return (pages + below) * self.page_size

    def unpin(self, token_ids: TokenIds, namespace: Namespace = BASE) -> bool:
        """Take a pin off. False if these tokens have none (never set, expired or flushed)."""
        ids = pack_ids(token_ids)
        below = self._prefixes.unpin_below(ids, namespace)
        return self._pins.unpin(ids, namespace) or below

    def flush(self, adapter_id: str | None = None) -> FlushReport:
        """Forget all prefixes, because the weights changed; or those of one adapter.

        Live sequences keep their pages and go on, but neither what they hold nor what they
        compute from now on can be matched.
        """
        spaces = [s for s in self._index.roots if adapter_id is None or s.adapter_id == adapter_id]
        pages = [page for space in spaces for page in self._index.clear(space)]
        for seq in self._live:
            if adapter_id is None or seq.namespace.adapter_id == adapter_id:
                seq._node = seq._copy_node = None
                seq._tail.clear()
        pins = sum(self._pins.forget(space) for space in spaces)
        freed = self._allocator.release(pages)
        self.stats.flushed_pages += len(pages)
        self._prefixes.forget_computed()
        below = self._arrivals.tiers.flush(adapter_id) if self._arrivals else 0
        return FlushReport(freed, len(pages) - freed, pins, below)

    # --- integrity ---------------------------------------------------------------------------
    def rebuild(self) -> None:
        """Begin anew after a failed :meth:`check_integrity`, with every page free. What the tiers
        hold stays; no copy of theirs may be under way.

        Raises:
            InvalidInputError: a sequence is live.
        """
        if self._live:
            raise InvalidInputError(f"{len(self._live)} sequences are live; release them first")
        self._allocator.reset()
        self._index.reset()
        self._pins.reset()
        self._prefixes.reset()
        if self._arrivals is not None:
            self._arrivals.reset()
        self.stats.rebuilds += 1

    def check_integrity(self) -> None:
        """Prove that every page is accounted for. Walks everything; for idle moments and tests.

        Raises:
            IntegrityError: naming the contradiction. The owner must stop using the cache, or
                :meth:`rebuild` it.
        """
        self._allocator.check_integrity()
        locks = [seq._node for seq in self._live] + [seq._copy_node for seq in self._live]
        check_index(self._index, [node for node in locks if node] + list(self._pins.nodes()))
        self._settle()
        abandoned = self._arrivals.abandoned_pages if self._arrivals else []
        check_counts(self._allocator, self._index, self._live, abandoned)

    # --- inside ------------------------------------------------------------------------------
    def _pin_in_pool(self, ids: PackedIds, namespace: Namespace, ttl_seconds: float) -> int:
        """How many of the prefix's pages are of use there and pinned."""
        return self._pins.pin(ids, namespace, ttl_seconds)

    def _settle(self) -> None:
        """Let time pass: pins expire, given-up copies end."""
        self._pins.expire()
        if self._arrivals is not None:
            self._arrivals.reap()

    def _allocate(self, num_pages: int) -> list[int] | None:
        """Pages from the free list, after evicting as many as are missing; all or none."""
        if num_pages > self.available_pages:
            return None
        self._prefixes.evict(num_pages - self._allocator.num_free)
        pages = self._allocator.allocate(num_pages)
        if pages:
            self._prefixes.claim(pages)
        return pages

    def _refuse_oversize(self, num_tokens: int) -> None:
        if num_tokens > self.max_tokens:
            raise CapacityError(
                f"{num_tokens} tokens need {self.pages_for(num_tokens)} pages of {self.page_size}; "
                f"the cache has {self.usable_pages} ({self.max_tokens} tokens). "
                "Shorten the request or give the cache more memory"
            )
