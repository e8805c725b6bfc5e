"""The cache's bookkeeping in one object: who holds which page, what is in it, who may reuse it.

A sequence's life::

    seq = manager.acquire(prompt_ids, namespace)     # match, lock, allocate; None: no room now
    ... issue seq.pending_copies on the device ...
    manager.copies_issued(seq)
    ... run the first step, whose layers join seq.fetch if there is one ...
    manager.fetched(seq)
    manager.extend(seq, num_tokens)                  # room for the next chunk or token
    ... run the step ...
    manager.commit(seq, ids_of_this_step)            # its full pages can be shared from now on
    manager.release(seq)                             # finished, aborted or preempted

Single-threaded by contract: the thread that schedules owns the manager, and all device work on
pages is issued on one stream in the order of these calls. That is why a page may be handed out
again as soon as it is free: what still reads it was issued before.
"""

from __future__ import annotations

from bicl.cache.accounts import BASE, PageAccounts
from bicl.cache.keys import ID_BYTES, Namespace, PackedIds, TokenIds, pack_ids
from bicl.cache.prefixes import Saving
from bicl.cache.radix_nodes import Match
from bicl.cache.sequence import PageCopy, SequencePages
from bicl.cache.stats import FlushReport
from bicl.cache.tiers import Promotion, Reservation
from bicl.errors import InvalidInputError

__all__ = ["BASE", "CacheManager", "FlushReport"]


class CacheManager(PageAccounts):
    """Sequences over one pool's pages, from their prompt to their end.

    Arguments, sizes, pins and flushes are those of :class:`PageAccounts`.
    """

    # --- a sequence's life -------------------------------------------------------------------
    def cached_tokens(self, token_ids: TokenIds, namespace: Namespace = BASE) -> int:
        """Tokens that :meth:`acquire` would find in the pool now. Changes and counts nothing."""
        if not self.prefix_cache:
            return 0
        ids = pack_ids(token_ids)
        match = self._match(ids, namespace)
        if match is None:
            return 0
        copied = match.partial.num_tokens if match.partial else 0
        return len(match.pages) * self.page_size + copied

    def host_holds_more(self, token_ids: TokenIds, namespace: Namespace = BASE) -> bool:
        """Whether host memory holds pages of a prompt that the pool does not. Changes nothing."""
        ids = pack_ids(token_ids)
        match = self._match(ids, namespace)
        return self._prefixes.host_holds_more(ids, namespace, match, self._reusable(ids))

    def promote(self, token_ids: TokenIds, namespace: Namespace = BASE) -> Promotion | None:
        """Begin to bring what is cached on disk alone into host memory, for an :meth:`acquire` to
        come. None if there is nothing, or computing is faster. Close it after that acquire."""
        if self._arrivals is None or not self.prefix_cache or not self._arrivals.tiers.has_disk:
            return None
        ids = pack_ids(token_ids)
        match = self._match(ids, namespace)
        return self._prefixes.promote(ids, namespace, match, self._reusable(ids))

    def gave_up_late(self) -> None:
        """A promotion took longer than computing would have; for the count."""
        if self._arrivals is not None:
            self._arrivals.tiers.gave_up_late()

    def acquire(
        self,
        token_ids: TokenIds,
        namespace: Namespace = BASE,
        *,
        num_tokens: int | None = None,
        reuse: bool = True,
        resumed: bool = False,
        only_arriving: bool = False,
        from_tiers: bool = True,
    ) -> SequencePages | None:
        """Begin a sequence: lock its longest cached prefix and allocate pages for the rest.

        What the tiers hold beyond the pool's pages is on its way from then on, see
        ``SequencePages.fetch``. At least the last token is left to compute. Nothing changes if
        there is no room.

        Args:
            token_ids: the prompt (of a resumed sequence: all its tokens so far); at least one.
            namespace: whose prefixes may be shared.
            num_tokens: allocate room for this many leading tokens only (a chunk; ``extend``
                brings the rest); default all. The cached prefix is always included.
            reuse: False computes everything anew. The result can still be reused by others.
            resumed: this sequence was preempted; finding its own pages is no hit worth counting.
            only_arriving: None if nothing would come from the tiers.
            from_tiers: False leaves what only they hold where it is.

        Returns:
            None if there is no room now, even after evicting all that may be evicted. With no
            other live sequence only pins and ``waits_for_copies`` can be in the way.

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
        limit = self._reusable(ids)
        match = coming = None
        if reuse and self.prefix_cache:
            match = self._match(ids, namespace)
            if from_tiers:
                coming = self._prefixes.reserve(ids, namespace, match, limit)
        if only_arriving and coming is None:
            return None
        seq = self._begin(ids, namespace, room, match, coming.num_pages if coming else 0)
        if seq is None:
            if coming:
                coming.drop()
            self.stats.refusals += 1
            return None
        if coming:
            self._start(seq, coming)
        if match and self._arrivals:
            self._arrivals.tiers.touch(match.keys)
        if self.prefix_cache and reuse and not resumed:
            seq._counts = True
            self.stats.queried_tokens += length
            arriving_pages = coming.num_pages if coming else 0
            self._prefixes.count_blocks(ids, namespace, match, arriving_pages, limit)
            arriving = seq.num_host_tokens + seq.num_disk_tokens  # counted when they are there
            self.stats.hit_tokens += seq.num_cached_tokens - arriving
            self.stats.copied_tokens += sum(copy.num_tokens for copy in seq.pending_copies)
        return seq

    def fetched(self, seq: SequencePages) -> None:
        """A step that joined ``seq.fetch`` in every layer is issued: its pages can be shared.

        Raises:
            InvalidInputError: ``seq`` is not live here, or its fetch failed.
        """
        self._check_live(seq)
        if seq.fetch is None:
            return
        if seq.fetch.failed:
            raise InvalidInputError("the fetch failed; release the sequence and compute its tokens")
        seq.fetch = None
        if seq._counts:
            self.stats.hit_tokens += seq.num_host_tokens + seq.num_disk_tokens
            self.stats.host_hit_tokens += seq.num_host_tokens
            self.stats.disk_hit_tokens += seq.num_disk_tokens
        self._index_full_pages(seq)

    def copies_issued(self, seq: SequencePages) -> None:
        """The device copies of ``seq.pending_copies`` are in the stream; let go of the sources."""
        self._check_live(seq)
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
            InvalidInputError: more tokens than there is room for, copies not issued or a fetch not
                joined yet, or ``seq`` is not live here. Nothing was changed.
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
        if seq.fetch is not None:
            raise InvalidInputError("pages are on their way; call fetched before commit")
        seq.num_committed_tokens = total
        if seq._node is None:
            return
        seq._tail += ids
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
        fetch = seq.fetch
        if fetch is not None and fetch.settled and not fetch.failed:
            self.fetched(seq)
        self._live.remove(seq)
        if keep and not seq.pending_copies and seq.fetch is None and seq._node and seq._tail:
            page = seq.page_ids[seq._num_indexed_pages]
            self._prefixes.add_partial(seq._node, bytes(seq._tail), page)
        self._drop_copies(seq)
        if seq._node is not None:
            self._index.unlock(seq._node, self._clock())
            seq._node = None
        pages = seq.page_ids
        if seq.fetch is not None:
            assert self._arrivals is not None
            coming = set(seq.fetch.pages)
            pages = [page for page in pages if page not in coming]
            self._arrivals.abandon(seq.fetch)
            seq.fetch = None
        self._allocator.release(pages)

    def page_keys(self, seq: SequencePages) -> list[bytes]:
        """Chain keys of a live sequence's indexed pages, first to last."""
        self._check_live(seq)
        if seq._node is None:
            return []
        runs = [node.keys for node in seq._node.path() if node.namespace is None]
        return [key for run in reversed(runs) for key in run]

    # --- inside ------------------------------------------------------------------------------
    def _reusable(self, ids: PackedIds) -> int:
        """Leading tokens of a prompt that need not be computed, wherever they come from."""
        return len(ids) // ID_BYTES - 1

    def _match(self, ids: PackedIds, namespace: Namespace) -> Match | None:
        """What the pool holds of them; None: nothing."""
        return self._prefixes.match(ids, namespace, self._reusable(ids))

    def _begin(
        self,
        ids: PackedIds,
        namespace: Namespace,
        num_tokens: int,
        match: Match | None,
        arriving: int,
    ) -> SequencePages | None:
        """A live sequence with room for ``num_tokens`` tokens; None: there is no room.

        Args:
            match: the pages that it shares.
            arriving: further ones that the tiers fill.
        """
        seq = self._lock_and_allocate(match, namespace, num_tokens, arriving)
        if seq is not None:
            matched_bytes = seq._num_indexed_pages * self.page_size * ID_BYTES
            seq._tail += ids[matched_bytes : seq.num_cached_tokens * ID_BYTES]
            self._live.add(seq)
        return seq

    def _start(self, seq: SequencePages, coming: Reservation) -> None:
        """Let the pages behind its shared ones come."""
        first = seq._num_indexed_pages
        seq.num_disk_tokens = coming.num_from_disk * self.page_size
        seq.num_host_tokens = coming.num_pages * self.page_size - seq.num_disk_tokens
        seq.fetch = coming.start(seq.page_ids[first : first + coming.num_pages])

    def _lock_and_allocate(
        self, match: Match | None, namespace: Namespace, num_tokens: int, arriving: int
    ) -> SequencePages | None:
        """Lock, then allocate, so that what was matched is not evicted for it."""
        shared = match.pages if match else []
        node = copy_node = None
        if self.prefix_cache:
            index = self._index
            node = index.lock_match(match) if match else index.lock_root(namespace)
        partial = match.partial if match and not arriving else None
        if partial:
            copy_node = partial.node
            self._index.lock(copy_node)
        wanted = max(self.pages_for(num_tokens) - len(shared), arriving)
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
        cached = (len(shared) + arriving) * self.page_size + (partial.num_tokens if partial else 0)
        seq = SequencePages(shared + pages, self.page_size, namespace, copies, cached)
        seq._node, seq._copy_node, seq._num_indexed_pages = node, copy_node, len(shared)
        return seq

    def _index_full_pages(self, seq: SequencePages, saving: Saving = Saving.NEW) -> None:
        """Its pages that became full, if there are any, can be shared, and come to the tiers."""
        page_bytes, first = self._index.page_bytes, seq._num_indexed_pages
        count = len(seq._tail) // page_bytes
        if seq._node is None or not count:
            return
        ids = bytes(seq._tail[: count * page_bytes])
        pages = seq.page_ids[first : first + count]
        seq._node = self._prefixes.add(seq._node, ids, pages, seq.namespace, saving)
        del seq._tail[: count * page_bytes]
        seq._num_indexed_pages += count

    def _drop_copies(self, seq: SequencePages) -> None:
        if seq._copy_node is not None:
            self._index.unlock(seq._copy_node, self._clock())
            seq._copy_node = None
        self._allocator.release(copy.source for copy in seq.pending_copies)
        seq.pending_copies = ()

    def _check_live(self, seq: SequencePages) -> None:
        if seq not in self._live:
            raise InvalidInputError(f"{seq!r} is not live here; it was released or is another's")
