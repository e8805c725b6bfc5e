"""Two page groups behind one manager: layers that keep every token, and layers that drop some.

The second group has a pool, page ids and a prefix index of its own. Until tokens are dropped it
holds the same tokens as the first, so that prefixes are shared in both or in neither.

Tiers hold a page of all layers under its name, whichever groups these are of: what goes there is a
full page of the first group with its twin of the second (:mod:`bicl.cache.tiers.twins`), and never
what was re-laid after a drop.
"""

from __future__ import annotations

from typing import Any

from bicl.cache.keys import ID_BYTES, Namespace, PackedIds, TokenIds, pack_ids
from bicl.cache.manager import BASE, CacheManager
from bicl.cache.prefixes import Saving
from bicl.cache.radix_nodes import Match
from bicl.cache.sequence import GroupPages, SequencePages
from bicl.cache.stats import FlushReport
from bicl.cache.tiers import Fetch, PageTiers, PageTwins, Reservation
from bicl.errors import ConfigError, InvalidInputError

__all__ = ["GroupedManager"]


class GroupedManager(CacheManager):
    """A ``CacheManager`` of the first group that takes the second along.

    Args:
        num_pages, page_size: of the first group, as for :class:`CacheManager`.
        group_pages: pages of the second one.
        reserve_pages: pages of the second group that beginning sequences leave free or evictable
            while others live, so that what one of those keeps can always be laid out.
        min_computed_tokens: newest tokens of a prompt that are never taken from the cache.
        tiers: of the pages of both groups; their mover knows twins.
        options: as for :class:`CacheManager`.

    Attributes:
        group: the second group's manager.

    Raises:
        ConfigError: a value that cannot work.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        group_pages: int,
        reserve_pages: int = 0,
        min_computed_tokens: int = 1,
        tiers: PageTiers | None = None,
        **options: Any,
    ) -> None:
        super().__init__(num_pages, page_size, tiers=tiers, **options)
        self._twins = None if tiers is None else tiers.mover.twins
        if tiers is not None and self._twins is None:
            raise ConfigError("the tiers of two page groups need a mover that knows twins")
        self.group = _SecondGroup(group_pages, page_size, self._twins, tiers, options)
        self._min_computed = min_computed_tokens
        self._reserve_pages = reserve_pages
        # Sequences that are gone, whose pages given-up copies still write to.
        self._leaving: list[tuple[Fetch, SequencePages]] = []

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest sequence that fits into both groups before any are dropped."""
        return min(self.usable_pages, self.group.usable_pages) * self.page_size

    @property
    def waits_for_copies(self) -> bool:
        """See :attr:`CacheManager.waits_for_copies`: in either group."""
        return bool(self._leaving) or super().waits_for_copies

    def fetched(self, seq: SequencePages) -> None:
        """See :meth:`CacheManager.fetched`."""
        super().fetched(seq)
        self.group._index_full_pages(_group_of(seq).pages)

    def extend(self, seq: SequencePages, num_tokens: int) -> bool:
        """See :meth:`CacheManager.extend`. If the second group has no room, the first may have
        grown already, which the next call finds."""
        self._settle()
        group = _group_of(seq)
        return super().extend(seq, num_tokens) and self.group.extend(
            group.pages, num_tokens - group.num_dropped_tokens
        )

    def commit(self, seq: SequencePages, token_ids: TokenIds) -> None:
        """See :meth:`CacheManager.commit`."""
        super().commit(seq, token_ids)
        group = _group_of(seq)
        if not group.num_dropped_tokens:
            self.group.commit(group.pages, token_ids)

    def release(self, seq: SequencePages, *, keep: bool = True) -> None:
        """See :meth:`CacheManager.release`; of the second group only whole pages stay cached."""
        twin, fetch = _group_of(seq).pages, seq.fetch
        super().release(seq, keep=keep)
        seq.group = None
        if fetch is not None and not fetch.settled:
            self._leaving.append((fetch, twin))
        else:
            self.group.release(twin, keep=False)

    def begin_drop(self, num_tokens: int) -> SequencePages | None:
        """Pages in the second group for what a sequence keeps there; None: no room now."""
        self._settle()
        ids = PackedIds(bytes(num_tokens * ID_BYTES))
        return self.group.acquire(ids, reuse=False, resumed=True)

    def finish_drop(self, seq: SequencePages, kept: SequencePages, num_dropped_tokens: int) -> int:
        """The kept tokens' copies into ``kept`` are issued: let go of the old pages.

        Args:
            num_dropped_tokens: by how many the sequence is shorter now in the second group.

        Returns:
            Pages that the sequence no longer holds. Those of its committed tokens stay shareable
            until they are evicted, and are in the tiers before that.
        """
        group = _group_of(seq)
        before = len(group.pages.page_ids)
        self.group.release(group.pages, keep=False)
        seq.group = GroupPages(kept, group.num_dropped_tokens + num_dropped_tokens)
        return before - len(kept.page_ids)

    def unpin(self, token_ids: TokenIds, namespace: Namespace = BASE) -> bool:
        """See :meth:`CacheManager.unpin`."""
        ids = pack_ids(token_ids)
        return self.group.unpin(ids, namespace) | super().unpin(ids, namespace)

    def flush(self, adapter_id: str | None = None) -> FlushReport:
        """See :meth:`CacheManager.flush`; pages of both groups are counted."""
        first, second = super().flush(adapter_id), self.group.flush(adapter_id)
        return FlushReport(
            first.freed_pages + second.freed_pages,
            first.orphaned_pages + second.orphaned_pages,
            first.dropped_pins + second.dropped_pins,
            first.tier_pages,
        )

    def rebuild(self) -> None:
        """See :meth:`CacheManager.rebuild`."""
        super().rebuild()
        self.group.rebuild()

    def check_integrity(self) -> None:
        """See :meth:`CacheManager.check_integrity`."""
        self._settle()
        super().check_integrity()
        self.group.check_integrity()

    # --- inside ------------------------------------------------------------------------------
    def _settle(self) -> None:
        super()._settle()
        leaving, self._leaving = self._leaving, []
        for fetch, twin in leaving:
            if fetch.settled:
                self.group.release(twin, keep=False)
            else:
                self._leaving.append((fetch, twin))

    def _reusable(self, ids: PackedIds) -> int:
        return max(0, len(ids) // ID_BYTES - self._min_computed)

    def _match(self, ids: PackedIds, namespace: Namespace) -> Match | None:
        """Whole pages that both groups hold."""
        limit = self._reusable(ids)
        first, second = (
            prefixes.match(ids, namespace, limit)
            for prefixes in (self._prefixes, self.group._prefixes)
        )
        if first is None or second is None:
            return None
        return first.first(min(len(first.pages), len(second.pages)))

    def _begin(
        self,
        ids: PackedIds,
        namespace: Namespace,
        num_tokens: int,
        match: Match | None,
        arriving: int,
    ) -> SequencePages | None:
        """Room in both groups, or in neither."""
        self._settle()
        same = None
        if match is not None:
            same = self.group._prefixes.match(ids, namespace, self._reusable(ids))
            assert same is not None
            same = same.first(len(match.pages))
        twin = self.group._begin(ids, namespace, num_tokens, same, arriving)
        if twin is None:
            return None
        seq = None
        if not self._live or self.group.available_pages >= self._reserve_pages:
            seq = super()._begin(ids, namespace, num_tokens, match, arriving)
        if seq is None:
            self.group.release(twin, keep=False)
            return None
        seq.group = GroupPages(twin)
        return seq

    def _start(self, seq: SequencePages, coming: Reservation) -> None:
        self._pair(seq, coming.num_pages)
        super()._start(seq, coming)

    def _index_full_pages(self, seq: SequencePages, saving: Saving = Saving.ALL) -> None:
        """All are saved: a page that this group's index holds may have lost its twin, and be gone
        from the tiers. What a sequence computes after a drop has no twin."""
        if _group_of(seq).num_dropped_tokens:
            saving = Saving.NONE
        else:
            self._pair(seq, len(seq._tail) // self._index.page_bytes)
        super()._index_full_pages(seq, saving)

    def _pair(self, seq: SequencePages, count: int) -> None:
        """So many pages behind its indexed ones, with those of the same tokens."""
        if self._twins is not None:
            pages = slice(seq._num_indexed_pages, seq._num_indexed_pages + count)
            self._twins.pair(seq.page_ids[pages], _group_of(seq).pages.page_ids[pages])

    def _pin_in_pool(self, ids: PackedIds, namespace: Namespace, ttl_seconds: float) -> int:
        """In both groups, as a page is of use in both only."""
        first = super()._pin_in_pool(ids, namespace, ttl_seconds)
        return min(first, self.group._pin_in_pool(ids, namespace, ttl_seconds))


class _SecondGroup(CacheManager):
    """Its pages come and go with those of the first.

    They leave as soon as a prompt is computed and its tokens are dropped, often in the very next
    step: what is on its way to the tiers by then is finished, where other pools give it up.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        twins: PageTwins | None,
        tiers: PageTiers | None,
        options: dict[str, Any],
    ) -> None:
        super().__init__(num_pages, page_size, **options)
        self._twins, self._tiers = twins, tiers

    def _allocate(self, num_pages: int) -> list[int] | None:
        pages = super()._allocate(num_pages)
        if pages and self._twins is not None and self._tiers is not None:
            self._tiers.claim(self._twins.owners(pages), finish=True)
        return pages


def _group_of(seq: SequencePages) -> GroupPages:
    if seq.group is None:
        raise InvalidInputError("the sequence is not live in the second page group")
    return seq.group
