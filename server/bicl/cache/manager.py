"""The cache's bookkeeping in one object: who holds which page, what is in it, who may reuse it.

A sequence's life::

    seq = manager.acquire(prompt_ids, namespace)     # match, lock, allocate; None: no room now
    ... issue seq.pending_copies on the device ...
    manager.copies_issued(seq)
    manager.extend(seq, num_tokens)                  # room for the next chunk or token
    ... run the step ...
    manager.commit(seq, ids_of_this_step)            # its full pages can be shared from now on
    manager.release(seq)                             # finished, aborted or preempted

Single-threaded by contract: the thread that schedules owns the manager, and all device work on
pages is issued on one stream in the order of these calls. That is why a page may be handed out
again as soon as it is free: what still reads it was issued before.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from bicl.cache.allocator import PageAllocator
from bicl.cache.integrity import check_counts, check_index
from bicl.cache.keys import ID_BYTES, HashFunction, Namespace, TokenIds, pack_ids, root_key, sha256
from bicl.cache.pins import PinTable
from bicl.cache.radix import Match, RadixIndex
from bicl.cache.sequence import PageCopy, SequencePages
from bicl.cache.stats import CacheGauges, CacheStats, FlushReport
from bicl.errors import CapacityError, ConfigError, InvalidInputError

__all__ = ["BASE", "CacheManager", "FlushReport"]

BASE = Namespace()
"""No salt, no adapter."""


class CacheManager:
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
            page_size, lambda space: root_key(space, model_revision, hash_function), hash_function
        )
        if max_pinned_pages is None:
            max_pinned_pages = self.usable_pages // 2
        self._pins = PinTable(self._index, max_pinned_pages, clock)
        self._live: set[SequencePages] = set()

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
        self._pins.expire()
        return self._allocator.num_free + self._index.num_evictable_pages

    def pages_for(self, num_tokens: int) -> int:
        """Pages that ``num_tokens`` tokens occupy."""
        return -(-num_tokens // self.page_size)

    def gauges(self) -> CacheGauges:
        """Where every page is now."""
        self._pins.expire()
        references = self._allocator.references
        pinned = sum(references(page) == 1 for page in self._pins.pages())
        free, cached = self._allocator.num_free, self._index.num_evictable_pages
        return CacheGauges(
            free_pages=free,
            cached_pages=cached,
            pinned_pages=pinned,
            in_use_pages=self.usable_pages - free - cached - pinned,
            reserved_pages=self._allocator.reserved_pages,
        )

    # --- a sequence's life -------------------------------------------------------------------
    def cached_tokens(self, token_ids: TokenIds, namespace: Namespace = BASE) -> int:
        """Tokens that :meth:`acquire` would find cached now. Changes and counts nothing."""
        ids = pack_ids(token_ids)
        match = self._match(ids, namespace, reuse=True)
        if match is None:
            return 0
        copied = match.partial.num_tokens if match.partial else 0
        return len(match.pages) * self.page_size + copied

    def acquire(
        self,
        token_ids: TokenIds,
        namespace: Namespace = BASE,
        *,
        num_tokens: int | None = None,
        reuse: bool = True,
        resumed: bool = False,
    ) -> SequencePages | None:
        """Begin a sequence: lock its longest cached prefix and allocate pages for the rest.

        At least the last token is left to compute. Nothing changes if there is no room.

        Args:
            token_ids: the prompt (of a resumed sequence: all its tokens so far); at least one.
            namespace: whose prefixes may be shared.
            num_tokens: allocate room for this many leading tokens only (a chunk; ``extend``
                brings the rest); default all. The cached prefix is always included.
            reuse: False computes everything anew. The result can still be reused by others.
            resumed: this sequence was preempted; finding its own pages is no hit worth counting.

        Returns:
            None if there is no room now, even after evicting all that may be evicted. With no
            other live sequence only pins can be in the way.

        Raises:
            CapacityError: ``token_ids`` can never fit.
            InvalidInputError: no tokens, or not integers.
        """
        ids = pack_ids(token_ids)
        length = len(ids) // ID_BYTES
        if length == 0:
            raise InvalidInputError("a sequence needs at least one token")
        self._refuse_oversize(length)
        room = length if num_tokens is None else min(max(num_tokens, 1), length)
        seq = self._lock_and_allocate(self._match(ids, namespace, reuse), namespace, room)
        if seq is None:
            self.stats.refusals += 1
            return None
        matched_bytes = seq._num_indexed_pages * self.page_size * ID_BYTES
        seq._tail += ids[matched_bytes : seq.num_cached_tokens * ID_BYTES]
        self._live.add(seq)
        if self.prefix_cache and reuse and not resumed:
            self.stats.queried_tokens += length
            self.stats.hit_tokens += seq.num_cached_tokens
            self.stats.copied_tokens += sum(copy.num_tokens for copy in seq.pending_copies)
        return seq

    def copies_issued(self, seq: SequencePages) -> None:
        """The device copies of ``seq.pending_copies`` are in the stream; let go of the sources."""
        self._check_live(seq)
        self.stats.page_copies += len(seq.pending_copies)
        self._drop_copies(seq)

    def extend(self, seq: SequencePages, num_tokens: int) -> bool:
        """Make room for ``num_tokens`` tokens in all. False: no room now, nothing changed.

        Raises:
            CapacityError: so many tokens can never fit.
            InvalidInputError: ``seq`` is not live here.
        """
        self._check_live(seq)
        missing = self.pages_for(num_tokens) - len(seq.page_ids)
        if missing <= 0:
            return True
        self._refuse_oversize(num_tokens)
        pages = self._allocate(missing)
        if pages is None:
            self.stats.refusals += 1
            return False
        seq.page_ids += pages
        return True

    def commit(self, seq: SequencePages, token_ids: TokenIds) -> None:
        """K and V of these tokens, which follow those committed before, are in their pages.

        Call it once their computation is issued. Pages that became full enter the index at once.
        If the index holds the same tokens in another page, ``seq`` keeps its own: its page table
        never changes under a running step, and the copy goes when the sequence ends.

        Raises:
            InvalidInputError: more tokens than there is room for, copies not issued yet, or
                ``seq`` is not live here. Nothing was changed.
        """
        self._check_live(seq)
        ids = pack_ids(token_ids)
        total = seq.num_committed_tokens + len(ids) // ID_BYTES
        if total > seq.capacity_tokens:
            raise InvalidInputError(
                f"{total} tokens are committed, but the sequence has room for "
                f"{seq.capacity_tokens}; call extend before the step"
            )
        if seq.pending_copies:
            raise InvalidInputError("page copies are pending; call copies_issued before commit")
        seq.num_committed_tokens = total
        if seq._node is None:
            return
        seq._tail += ids
        if len(seq._tail) >= self._index.page_bytes:
            self._index_full_pages(seq)

    def release(self, seq: SequencePages, *, keep: bool = True) -> None:
        """End a sequence (finished, aborted or preempted) and let go of its pages.

        Committed tokens stay in the cache until evicted, those of a last page that is not full
        included; nothing else ever enters it.

        Args:
            keep: False leaves out the last page. Full pages were indexed at their commit.

        Raises:
            InvalidInputError: ``seq`` is not live here (released before, or another manager's).
        """
        self._check_live(seq)
        self._live.remove(seq)
        if keep and not seq.pending_copies:
            self._index_last_page(seq)
        self._drop_copies(seq)
        if seq._node is not None:
            self._index.unlock(seq._node, self._clock())
            seq._node = None
        self._allocator.release(seq.page_ids)

    # --- prefixes ----------------------------------------------------------------------------
    def pin(
        self, token_ids: TokenIds, namespace: Namespace = BASE, ttl_seconds: float | None = None
    ) -> int:
        """Protect the cached whole pages of a prefix from eviction.

        Pinning the same tokens again renews the time and covers what was cached since.

        Args:
            token_ids: the prefix, computed before by some sequence.
            namespace: whose prefix it is.
            ttl_seconds: how long; None is until ``unpin`` or ``flush``.

        Returns:
            Tokens protected; 0 if the prefix is not cached, and then there is no pin.

        Raises:
            CapacityError: pins would protect more than ``max_pinned_pages``.
            InvalidInputError: ``ttl_seconds`` is not positive.
        """
        if ttl_seconds is not None and not ttl_seconds > 0:
            raise InvalidInputError(f"ttl_seconds is {ttl_seconds}; a positive time is needed")
        ttl = math.inf if ttl_seconds is None else ttl_seconds
        return self._pins.pin(pack_ids(token_ids), namespace, ttl) * self.page_size

    def unpin(self, token_ids: TokenIds, namespace: Namespace = BASE) -> bool:
        """Take a pin off. False if these tokens have none (never set, expired or flushed)."""
        return self._pins.unpin(pack_ids(token_ids), namespace)

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
        return FlushReport(freed, len(pages) - freed, pins)

    def page_keys(self, seq: SequencePages) -> list[bytes]:
        """Chain keys of a live sequence's indexed pages, first to last."""
        self._check_live(seq)
        if seq._node is None:
            return []
        runs = [node.keys for node in seq._node.path() if node.namespace is None]
        return [key for run in reversed(runs) for key in run]

    # --- integrity ---------------------------------------------------------------------------
    def check_integrity(self) -> None:
        """Prove that every page is accounted for. Walks everything; for idle moments and tests.

        Raises:
            IntegrityError: naming the contradiction. The owner must stop using the cache.
        """
        self._allocator.check_integrity()
        locks = [seq._node for seq in self._live] + [seq._copy_node for seq in self._live]
        check_index(self._index, [node for node in locks if node] + list(self._pins.nodes()))
        check_counts(self._allocator, self._index, self._live)

    # --- inside ------------------------------------------------------------------------------
    def _match(self, ids: bytes, namespace: Namespace, reuse: bool) -> Match | None:
        if not (reuse and self.prefix_cache):
            return None
        match = self._index.match(namespace, ids, len(ids) // ID_BYTES - 1)
        if match and match.partial and match.partial.num_tokens < self.min_copy_tokens:
            match = match._replace(partial=None)
        return match

    def _lock_and_allocate(
        self, match: Match | None, namespace: Namespace, num_tokens: int
    ) -> SequencePages | None:
        """Lock, then allocate, so that what was matched is not evicted for it."""
        shared = match.pages if match else []
        node = copy_node = None
        if self.prefix_cache:
            index = self._index
            node = index.lock_match(match) if match else index.lock_root(namespace)
        partial = match.partial if match else None
        if partial:
            copy_node = partial.node
            self._index.lock(copy_node)
        wanted = self.pages_for(num_tokens) - len(shared)
        pages = self._allocate(max(wanted, 1 if partial else 0))
        if pages is None and copy_node:  # its source may be the room that is missing
            self._index.unlock(copy_node, self._clock())
            partial = copy_node = None
            pages = self._allocate(wanted)
        if pages is None:
            if node:
                self._index.unlock(node, self._clock())
            return None
        self._allocator.retain(shared)
        copies: tuple[PageCopy, ...] = ()
        if partial:
            self._allocator.retain([partial.page])
            copies = (PageCopy(partial.page, pages[0], partial.num_tokens),)
        cached = len(shared) * self.page_size + (partial.num_tokens if partial else 0)
        seq = SequencePages(shared + pages, self.page_size, namespace, copies, cached)
        seq._node, seq._copy_node, seq._num_indexed_pages = node, copy_node, len(shared)
        return seq

    def _allocate(self, num_pages: int) -> list[int] | None:
        """Pages from the free list, after evicting as many as are missing; all or none."""
        if num_pages > self.available_pages:
            return None
        missing = num_pages - self._allocator.num_free
        if missing > 0:
            self._evict(missing)
        pages = self._allocator.allocate(num_pages)
        self.stats.allocated_pages += max(num_pages, 0)
        return pages

    def _evict(self, num_pages: int) -> None:
        now = self._clock()
        for pages, last_used in self._index.evict(num_pages):
            self._allocator.release(pages)
            self.stats.evicted_pages += len(pages)
            self.stats.evicted_age_ms += len(pages) * int(1000 * (now - last_used))

    def _index_full_pages(self, seq: SequencePages) -> None:
        assert seq._node is not None
        count = len(seq._tail) // self._index.page_bytes
        first = seq._num_indexed_pages
        pages = seq.page_ids[first : first + count]
        edge = count * self._index.page_bytes
        seq._node, present, dropped = self._index.insert(seq._node, seq._tail[:edge], pages)
        del seq._tail[:edge]
        seq._num_indexed_pages += count
        self._allocator.retain(pages[present:])
        self._allocator.release(dropped)
        self.stats.inserted_pages += count - present
        self.stats.duplicate_pages += present

    def _index_last_page(self, seq: SequencePages) -> None:
        if seq._node is None or len(seq._tail) < self.min_copy_tokens * ID_BYTES:
            return
        page = seq.page_ids[seq._num_indexed_pages]
        inserted = self._index.insert_partial(seq._node, bytes(seq._tail), page, self._clock())
        if inserted is not None:
            self._allocator.retain([page])
            self._allocator.release(inserted.dropped)
            self.stats.inserted_pages += 1

    def _drop_copies(self, seq: SequencePages) -> None:
        if seq._copy_node is not None:
            self._index.unlock(seq._copy_node, self._clock())
            seq._copy_node = None
        self._allocator.release(copy.source for copy in seq.pending_copies)
        seq.pending_copies = ()

    def _refuse_oversize(self, num_tokens: int) -> None:
        if num_tokens > self.max_tokens:
            raise CapacityError(
                f"{num_tokens} tokens need {self.pages_for(num_tokens)} pages of {self.page_size}; "
                f"the cache has {self.usable_pages} ({self.max_tokens} tokens). "
                "Shorten the request or give the cache more memory"
            )

    def _check_live(self, seq: SequencePages) -> None:
        if seq not in self._live:
            raise InvalidInputError(f"{seq!r} is not live here; it was released or is another's")
