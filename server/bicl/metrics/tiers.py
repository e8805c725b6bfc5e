"""Pages in host memory and on disk: what is held there, found there and copied."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from bicl.cache.tiers import FAILURES, TierStats
from bicl.metrics.families import gauge

if TYPE_CHECKING:
    from bicl.frontends.http.engine.config import EngineStats

__all__ = ["copies_and_pages", "tier_metrics"]


def tier_metrics(stats: EngineStats) -> Iterator[Metric]:
    assert stats.tiers is not None
    hits = CounterMetricFamily(
        "bicl_tier_hit_tokens", "Prompt tokens found, by where", labels=["tier"]
    )
    pool = stats.hit_tokens - stats.host_hit_tokens - stats.disk_hit_tokens
    hits.add_metric(["device"], pool)
    hits.add_metric(["host"], stats.host_hit_tokens)
    hits.add_metric(["disk"], stats.disk_hit_tokens)
    yield hits
    yield from copies_and_pages(stats.tiers)


def copies_and_pages(tiers: TierStats) -> Iterator[Metric]:
    moved = CounterMetricFamily("bicl_tier_bytes", "Bytes of pages copied", labels=["copy"])
    for copy, num_bytes in (
        ("device_to_host", tiers.saved_bytes),
        ("host_to_device", tiers.loaded_bytes),
        ("host_to_disk", tiers.disk_written_bytes),
        ("disk_to_host", tiers.disk_read_bytes),
    ):
        moved.add_metric([copy], num_bytes)
    yield moved
    seconds = CounterMetricFamily(
        "bicl_tier_load_seconds", "Time of copies to the device", labels=["time"]
    )
    seconds.add_metric(["hidden"], tiers.hidden_seconds)
    seconds.add_metric(["exposed"], tiers.exposed_seconds)
    yield seconds
    failures = CounterMetricFamily(
        "bicl_tier_failures", "Reads that failed; their tokens were computed", labels=["reason"]
    )
    for reason in FAILURES:
        failures.add_metric([reason], tiers.failures[reason])
    yield failures
    lost = CounterMetricFamily(
        "bicl_tier_evicted_pages", "Pages that left a tier to make room", labels=["tier"]
    )
    lost.add_metric(["host"], tiers.host_evicted_pages)
    lost.add_metric(["disk"], tiers.disk_evicted_pages)
    yield lost
    ages = CounterMetricFamily(
        "bicl_tier_evicted_page_age_seconds",
        "Sum over such pages of the time since their last use",
        labels=["tier"],
    )
    ages.add_metric(["host"], tiers.host_evicted_seconds)
    ages.add_metric(["disk"], tiers.disk_evicted_seconds)
    yield ages
    for name, text, value in (
        ("bicl_tier_skipped_fetches", "Hits sooner computed than copied", tiers.skipped_fetches),
        ("bicl_tier_cancelled_fetches", "Copies given up", tiers.cancelled_fetches),
        ("bicl_tier_unsaved_pages", "Pages that never reached the host", tiers.dropped_saves),
        (
            "bicl_tier_unwritten_pages",
            "Pages that never reached disk",
            tiers.disk_dropped_pages,
        ),
    ):
        yield CounterMetricFamily(name, text, value=value)
    held = GaugeMetricFamily("bicl_tier_pages", "Pages held", labels=["tier"])
    held.add_metric(["host"], tiers.host_pages)
    held.add_metric(["disk"], tiers.disk_pages)
    yield held
    yield gauge("bicl_tier_host_page_capacity", "Room of the host tier", tiers.host_slots)
    yield gauge("bicl_tier_disk_bytes", "Bytes of the disk tier in use", tiers.disk_bytes)
    yield gauge("bicl_tier_disk_max_bytes", "Bytes of the disk tier", tiers.disk_max_bytes)
