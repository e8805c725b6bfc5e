"""Two page groups behind one manager: layers that keep every token, and layers that drop some.

The second group has a pool, page ids and a prefix index of its own. Until tokens are dropped it
holds the same tokens as the first, so that prefixes are shared in both or in neither.
"""

from __future__ import annotations

from typing import Any

from bicl.cache.keys import ID_BYTES, Namespace, PackedIds, TokenIds, pack_ids
from bicl.cache.manager import BASE, CacheManager
from bicl.cache.sequence import GroupPages, SequencePages
from bicl.cache.stats import FlushReport
from bicl.errors import InvalidInputError

__all__ = ["GroupedManager"]


class GroupedManager(CacheManager):
    """A ``CacheManager`` of the first group that takes the second along.

    Args:
        num_pages, page_size: of the first group, as for :class:`CacheManager`.
        group_pages: pages of the second one.
        reserve_pages: pages of the second group that beginning sequences leave free or evictable
            while others live, so that what one of those keeps can always be laid out.
        min_computed_tokens: newest tokens of a prompt that are never taken from the cache.
        options: as for :class:`CacheManager`; tiers are not among them.

    Attributes:
        group: the second group's manager.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        group_pages: int,
        reserve_pages: int = 0,
        min_computed_tokens: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(num_pages, page_size, **options)
        self.group = CacheManager(group_pages, page_size, **options)
        self._min_computed = min_computed_tokens
        self._reserve_pages = reserve_pages

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest sequence that fits into both groups before any are dropped."""
        return min(self.usable_pages, self.group.usable_pages) * self.page_size

    def cached_tokens(self, token_ids: TokenIds, namespace: Namespace = BASE) -> int:
        """Tokens that both groups hold: whole pages."""
        ids = pack_ids(token_ids)
        most = len(ids) // ID_BYTES - self._min_computed
        both = min(super().cached_tokens(ids, namespace), self.group.cached_tokens(ids, namespace))
        return max(0, min(both, most)) // self.page_size * self.page_size

    def acquire(
        self, token_ids: TokenIds, namespace: Namespace = BASE, **options: Any
    ) -> SequencePages | None:
        """See :meth:`CacheManager.acquire`: room in both groups, or in neither."""
        ids = pack_ids(token_ids)
        shared = self.cached_tokens(ids, namespace) if options.get("reuse", True) else 0
        options["max_cached"] = min(shared, options.get("max_cached") or shared)
        twin = self.group.acquire(ids, namespace, **options)
        if twin is None:
            return None
        if self._live and self.group.available_pages < self._reserve_pages:
            self.group.release(twin, keep=False)
            return None
        seq = super().acquire(ids, namespace, **options)
        if seq is None:
            self.group.release(twin, keep=False)
            return None
        seq.group = GroupPages(twin)
        return seq

    def extend(self, seq: SequencePages, num_tokens: int) -> bool:
        """See :meth:`CacheManager.extend`. If the second group has no room, the first may have
        grown already, which the next call finds."""
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
        group = _group_of(seq)
        super().release(seq, keep=keep)
        self.group.release(group.pages, keep=False)
        seq.group = None

    def begin_drop(self, num_tokens: int) -> SequencePages | None:
        """Pages in the second group for what a sequence keeps there; None: no room now."""
        ids = PackedIds(bytes(num_tokens * ID_BYTES))
        return self.group.acquire(ids, reuse=False, resumed=True)

    def finish_drop(self, seq: SequencePages, kept: SequencePages, num_dropped_tokens: int) -> int:
        """The kept tokens' copies into ``kept`` are issued: let go of the old pages.

        Args:
            num_dropped_tokens: by how many the sequence is shorter now in the second group.

        Returns:
            Pages that the sequence no longer holds. Those of its committed tokens stay shareable
            until they are evicted.
        """
        group = _group_of(seq)
        before = len(group.pages.page_ids)
        self.group.release(group.pages, keep=False)
        seq.group = GroupPages(kept, group.num_dropped_tokens + num_dropped_tokens)
        return before - len(kept.page_ids)

    def pin(
        self, token_ids: TokenIds, namespace: Namespace = BASE, ttl_seconds: float | None = None
    ) -> int:
        """See :meth:`CacheManager.pin`: in both groups, as a prefix is of use in both only."""
        ids = pack_ids(token_ids)
        first = super().pin(ids, namespace, ttl_seconds)
        return min(first, self.group.pin(ids, namespace, ttl_seconds))

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
        )

    def rebuild(self) -> None:
        """See :meth:`CacheManager.rebuild`."""
        super().rebuild()
        self.group.rebuild()

    def check_integrity(self) -> None:
        """See :meth:`CacheManager.check_integrity`."""
        super().check_integrity()
        self.group.check_integrity()


def _group_of(seq: SequencePages) -> GroupPages:
    if seq.group is None:
        raise InvalidInputError("the sequence is not live in the second page group")
    return seq.group
