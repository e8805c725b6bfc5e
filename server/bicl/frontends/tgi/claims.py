"""Which tokens each page holds, as far as this shard wrote them itself.

TGI's router decides which pages a request shares, and can offer pages that were never computed
(after a failed, dropped or cancelled prefill). The shard sees the whole prompt, so it can check.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bicl.cache.keys import Namespace, PageChain, root_key
from bicl.cache.tags import PageTags

__all__ = ["ClaimCounters", "Claims"]


@dataclass
class ClaimCounters:
    """Monotonic.

    Attributes:
        claimed_tokens: that the router called cached.
        accepted_tokens: of them, those whose pages carry the right tags.
        rejected_claims: requests of which that was not so for all.
        mended_tokens: claimed, but not there, and computed before the request began.
        added_tokens: that the router did not claim, brought back from the tiers.
    """

    claimed_tokens: int = 0
    accepted_tokens: int = 0
    rejected_claims: int = 0
    mended_tokens: int = 0
    added_tokens: int = 0


class Claims:
    """Compares what the router claims with what the pages hold. Its page 0 never holds anything."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.counters = ClaimCounters()
        self._tags = PageTags()

    def chain(self, token_ids: Sequence[int], adapter_id: str = "") -> PageChain:
        """The keys of a request's whole pages."""
        root = root_key(Namespace(adapter_id=adapter_id))
        return PageChain(token_ids, self.page_size, [root], group=adapter_id)

    def verify(self, chain: PageChain, pages: Sequence[int], claimed: int) -> int:
        """How many of the tokens that the router calls cached are in the pages.

        A claim that ends inside a page counts with the whole page.
        """
        accepted = 0
        for index in range(-(-claimed // self.page_size)):
            if index >= chain.num_pages or self._tags.get(pages[index]) != chain.key(index):
                break
            accepted = min(claimed, accepted + self.page_size)
        self.counters.claimed_tokens += claimed
        self.counters.accepted_tokens += accepted
        self.counters.rejected_claims += accepted < claimed
        return accepted

    def take(self, pages: Sequence[int]) -> None:
        """These pages are about to be written: forget what they held."""
        self._tags.clear(pages)

    def record(self, chain: PageChain, pages: Sequence[int], first: int, last: int) -> None:
        """The chain's pages ``first .. last`` (exclusive) are written."""
        for index in range(first, min(last, chain.num_pages)):
            if pages[index] != 0:
                self._tags.write([pages[index]], [chain.key(index)])

    def clear(self) -> None:
        """The pages are gone: new memory."""
        self._tags.clear_all()
