"""Pages outside the pool: host memory and disk. See :class:`PageTiers`."""

from bicl.cache.tiers.costs import TransferCosts
from bicl.cache.tiers.mover import Copy, Done, HostMover, PageMover
from bicl.cache.tiers.stats import FAILURES, TierStats
from bicl.cache.tiers.tiers import PageTiers
from bicl.cache.tiers.transfers import Fetch, Promotion, Reservation
from bicl.cache.tiers.twins import PageTwins

__all__ = [
    "FAILURES",
    "Copy",
    "Done",
    "Fetch",
    "HostMover",
    "PageMover",
    "PageTiers",
    "PageTwins",
    "Promotion",
    "Reservation",
    "TierStats",
    "TransferCosts",
]
