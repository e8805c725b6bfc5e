"""What the tiers did (counters) and what they hold (gauges)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

__all__ = ["FAILURES", "TierStats"]

FAILURES = ("missing", "short", "corrupt", "foreign", "late", "io", "stale", "copy")
"""Why pages did not come."""


@dataclass(slots=True)
class TierStats:
    """Counters since start; they only grow. ``*_pages`` below ``host`` and ``disk`` are gauges.

    Attributes:
        saved_pages, saved_bytes: pool to host.
        dropped_saves: pages that were to be saved, but were overwritten first or found no slot.
        loaded_pages, loaded_bytes: host to pool.
        disk_written_pages, disk_written_bytes: host to disk.
        disk_dropped_pages: pages not written because the disk fell behind or refused.
        disk_read_pages, disk_read_bytes: disk to host.
        host_evicted_pages, disk_evicted_pages: pages that left a tier to make room; over them,
            ``host_evicted_seconds`` and ``disk_evicted_seconds`` are the sums of the times since
            their last use (of pages found on disk at start: since then).
        hidden_seconds, exposed_seconds: time of copies to the pool during which computation went
            on, and during which it waited.
        skipped_fetches: hits left alone because computing them anew is faster.
        cancelled_fetches: fetches given up before they ended.
        failures: by reason (``FAILURES``); each was made good by computing the tokens.
        host_pages, host_slots, disk_pages, disk_bytes, disk_max_bytes: what is held, of how much.
    """

    saved_pages: int = 0
    saved_bytes: int = 0
    dropped_saves: int = 0
    loaded_pages: int = 0
    loaded_bytes: int = 0
    disk_written_pages: int = 0
    disk_written_bytes: int = 0
    disk_dropped_pages: int = 0
    disk_read_pages: int = 0
    disk_read_bytes: int = 0
    host_evicted_pages: int = 0
    disk_evicted_pages: int = 0
    host_evicted_seconds: float = 0.0
    disk_evicted_seconds: float = 0.0
    hidden_seconds: float = 0.0
    exposed_seconds: float = 0.0
    skipped_fetches: int = 0
    cancelled_fetches: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    host_pages: int = 0
    host_slots: int = 0
    disk_pages: int = 0
    disk_bytes: int = 0
    disk_max_bytes: int = 0
