"""A sequence's pages: what the manager hands out and takes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from bicl.cache.keys import Namespace
from bicl.cache.radix_nodes import Node
from bicl.cache.tiers import Fetch

__all__ = ["PageCopy", "SequencePages"]


class PageCopy(NamedTuple):
    """A page to copy, in all layers, before the sequence's first forward step.

    The whole page may be copied; only its first ``num_tokens`` tokens are of use.
    """

    source: int
    target: int
    num_tokens: int


@dataclass
class GroupPages:
    """A sequence's pages in the second group, whose layers may hold fewer of its tokens.

    Attributes:
        pages: of that group's manager.
        num_dropped_tokens: tokens that are no longer there: token ``i`` of the sequence's newest
            ones lies at place ``i - num_dropped_tokens``.
    """

    pages: SequencePages
    num_dropped_tokens: int = 0


class SequencePages:
    """Pages of one live sequence. Read-only outside the manager; ends with ``release``.

    Token ``i`` lies in page ``page_ids[i // page_size]`` at offset ``i % page_size``. Ids are only
    ever appended to ``page_ids``; those handed out never change.

    Attributes:
        page_ids: in order; room for ``capacity_tokens`` tokens.
        num_cached_tokens: leading tokens that need not be computed, those in ``pending_copies``
            included. Always less than the prompt's length.
        num_committed_tokens: leading tokens whose K and V are there; starts at
            ``num_cached_tokens`` and grows by ``commit``.
        pending_copies: copies to issue before the first step, and then to confirm with
            ``CacheManager.copies_issued``.
        fetch: pages on their way from the tiers, to join in every layer of the first step, and then
            to confirm with ``CacheManager.fetched``.
        num_host_tokens, num_disk_tokens: those of ``num_cached_tokens`` that came from there.
        group: its pages in a second page group, see :mod:`bicl.cache.groups`.
    """

    __slots__ = (
        "_copy_node",
        "_counts",
        "_node",
        "_num_indexed_pages",
        "_page_size",
        "_tail",
        "fetch",
        "group",
        "namespace",
        "num_cached_tokens",
        "num_committed_tokens",
        "num_disk_tokens",
        "num_host_tokens",
        "page_ids",
        "pending_copies",
    )

    def __init__(
        self,
        page_ids: list[int],
        page_size: int,
        namespace: Namespace,
        copies: tuple[PageCopy, ...],
        num_cached_tokens: int,
    ) -> None:
        self.page_ids = page_ids
        self.namespace = namespace
        self.pending_copies = copies
        self.num_cached_tokens = num_cached_tokens
        self.num_committed_tokens = num_cached_tokens
        self.num_host_tokens = 0
        self.num_disk_tokens = 0
        self.fetch: Fetch | None = None
        self.group: GroupPages | None = None
        self._page_size = page_size
        self._node: Node | None = None  # locked end of the indexed chain; None: not indexed
        self._copy_node: Node | None = None  # locked until the copy is issued
        self._num_indexed_pages = 0
        self._counts = False  # its hits are counted
        self._tail = bytearray()  # packed ids committed after the indexed chain

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit into ``page_ids``."""
        return len(self.page_ids) * self._page_size

    def __repr__(self) -> str:
        return (
            f"SequencePages({len(self.page_ids)} pages, {self.num_committed_tokens} tokens "
            f"committed, {self.num_cached_tokens} cached)"
        )
