"""What the cache did (counters) and what it holds (gauges), as plain integers."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CacheGauges", "CacheStats", "FlushReport"]


@dataclass(slots=True)
class CacheStats:
    """Counters since start. They only grow; whoever publishes them computes rates.

    Attributes:
        queried_tokens: prompt tokens of admitted sequences that were looked up. A resumed
            sequence and one that asked for no reuse are not counted.
        hit_tokens: those among them that need not be computed.
        copied_tokens: those among ``hit_tokens`` that came by copy of part of a page.
        host_hit_tokens, disk_hit_tokens: those that came from these tiers; the others were in the
            pool.
        duplicate_pages: pages computed although the index held the same tokens already.
        evicted_pages: pages that left the index to make room.
        evicted_age_ms: sum over ``evicted_pages`` of the time since their last use.
        flushed_pages: pages that a flush took out of the index.
        refusals: times that a sequence found no room.
        block_hits: prompts' pages found in any tier.
        block_misses: prompts' pages that were computed before, but are held no more. What was never
            computed counts as neither.
        tag_mismatches: indexed pages that did not carry their tag; their tokens were computed anew.
        rebuilds: times that the bookkeeping contradicted itself and was begun anew.
    """

    queried_tokens: int = 0
    hit_tokens: int = 0
    copied_tokens: int = 0
    host_hit_tokens: int = 0
    disk_hit_tokens: int = 0
    duplicate_pages: int = 0
    evicted_pages: int = 0
    evicted_age_ms: int = 0
    flushed_pages: int = 0
    refusals: int = 0
    block_hits: int = 0
    block_misses: int = 0
    tag_mismatches: int = 0
    rebuilds: int = 0


@dataclass(frozen=True, slots=True)
class CacheGauges:
    """Where every page is at one moment; the six add up to the pool.

    Attributes:
        free_pages: hold nothing.
        cached_pages: hold a prefix nobody uses now; the next allocation may evict them.
        pinned_pages: hold a prefix that only a pin protects.
        in_use_pages: held by a sequence, or shielded by one (a copy about to be made).
        reserved_pages: never handed out.
        loading_pages: a copy that was given up still writes to them; free when it ends.
    """

    free_pages: int
    cached_pages: int
    pinned_pages: int
    in_use_pages: int
    reserved_pages: int
    loading_pages: int = 0

    @property
    def total_pages(self) -> int:
        return (
            self.free_pages
            + self.cached_pages
            + self.pinned_pages
            + self.in_use_pages
            + self.reserved_pages
            + self.loading_pages
        )


@dataclass(frozen=True, slots=True)
class FlushReport:
    """What a flush did.

    Attributes:
        freed_pages: pages that are free now.
        orphaned_pages: pages that nobody can match any more, but that live sequences still hold;
            they become free when those end.
        dropped_pins: pins that went with them.
        tier_pages: pages that the tiers forgot.
    """

    freed_pages: int
    orphaned_pages: int
    dropped_pins: int
    tier_pages: int = 0
