"""The manager's dealings with the tiers: what can come, what comes, what must not be reused yet."""

from __future__ import annotations

from bicl.cache.allocator import PageAllocator
from bicl.cache.keys import PageChain
from bicl.cache.tiers import Fetch, PageTiers, Promotion, Reservation

__all__ = ["Arrivals"]


class Arrivals:
    """Pages of the pool that copies from the tiers fill.

    A fetch that is given up may still have copies running. Its pages stay allocated until they
    ended, and only then become free: they are neither handed out too early nor lost. (A33)

    Args:
        tiers: where pages come from.
        allocator: of the pool's pages.
    """

    def __init__(self, tiers: PageTiers, allocator: PageAllocator) -> None:
        self.tiers = tiers
        self._allocator = allocator
        self._abandoned: list[Fetch] = []

    @property
    def abandoned_pages(self) -> list[int]:
        """Pages that given-up copies still write to."""
        return [page for fetch in self._abandoned for page in fetch.pages]

    def reserve(self, chain: PageChain, first: int, last: int) -> Reservation | None:
        """What the host holds of the chain's pages ``first .. last``; None if that is nothing, or
        sooner computed than copied."""
        if first >= last:
            return None
        reservation = self.tiers.reserve(chain, first, last)
        if reservation.num_pages and self.tiers.fetch_pays(reservation.num_pages):
            return reservation
        reservation.drop()
        return None

    def promote(self, chain: PageChain, first: int, last: int) -> Promotion | None:
        """Bring what is on disk of these pages nearer, if that pays."""
        return self.tiers.promote(chain, first, last) if first < last else None

    def abandon(self, fetch: Fetch) -> None:
        """Give a fetch up and let go of its pages, now or when its copies ended."""
        fetch.cancel()
        self._abandoned.append(fetch)
        self.reap()

    def reset(self) -> None:
        """The allocator forgot everything; no copy is under way."""
        self._abandoned.clear()

    def reap(self) -> None:
        """Free the pages of given-up fetches whose copies ended."""
        if not self._abandoned:
            return
        waiting = []
        for fetch in self._abandoned:
            if fetch.settled:
                self._allocator.release(fetch.pages)
            else:
                waiting.append(fetch)
        self._abandoned = waiting
