"""What the engine counts, from one snapshot a scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from bicl.metrics.families import gauge
from bicl.metrics.sparse import sparse_metrics
from bicl.metrics.tiers import tier_metrics

if TYPE_CHECKING:
    from bicl.frontends.http.engine.config import EngineStats

__all__ = ["CacheFacts", "EngineCollector"]


@dataclass(frozen=True)
class CacheFacts:
    """What does not change while the server runs.

    Attributes:
        max_batch_total_tokens: tokens that the whole pool holds.
        reuse_enabled: pages are shared between requests.
        labels: of the gauge ``bicl_info``.
        fallbacks: what runs otherwise than asked for, one sentence each.
    """

    max_batch_total_tokens: int
    reuse_enabled: bool
    labels: Mapping[str, str]
    fallbacks: tuple[str, ...] = ()


class EngineCollector:
    """Reads one snapshot a scrape."""

    def __init__(self, snapshot: Callable[[], EngineStats], facts: CacheFacts) -> None:
        self._snapshot = snapshot
        self._facts = facts

    def collect(self) -> Iterator[Metric]:
        stats = self._snapshot()
        yield from _tgi_gauges(stats, self._facts)
        yield from _cache_gauges(stats)
        yield from _engine_counters(stats)
        yield from tier_metrics(stats)
        yield from sparse_metrics(stats.sparse)
        yield from _told(self._facts, stats)


def _tgi_gauges(stats: EngineStats, facts: CacheFacts) -> Iterator[Metric]:
    yield gauge("tgi_queue_size", "Current queue size", stats.queue_size)
    yield gauge("tgi_batch_current_size", "Current batch size", stats.batch_size)
    yield gauge(
        "tgi_batch_current_max_tokens",
        "Maximum tokens for the current batch",
        stats.batch_current_max_tokens,
    )
    text = "Maximum amount of tokens in total"
    yield gauge("tgi_batch_max_total_tokens", text, facts.max_batch_total_tokens)


def _cache_gauges(stats: EngineStats) -> Iterator[Metric]:
    pages = GaugeMetricFamily("bicl_pages", "Pages of the cache by state", labels=["state"])
    pages.add_metric(["free"], stats.pages_free)
    pages.add_metric(["cached"], stats.pages_cached)
    pages.add_metric(["in_use"], stats.pages_in_use)
    pages.add_metric(["pinned"], stats.pages_pinned)
    pages.add_metric(["loading"], stats.pages_loading)
    yield pages
    yield gauge("bicl_page_capacity", "Pages of the cache", stats.pages_total)
    usage = stats.pages_in_use / stats.pages_total if stats.pages_total else 0.0
    yield gauge("bicl_cache_usage_ratio", "Pages in use over all pages", usage)
    yield gauge(
        "bicl_ready", "1 while new requests are taken", stats.healthy and not stats.draining
    )


def _engine_counters(stats: EngineStats) -> Iterator[Metric]:
    for name, text, value in (
        (
            "bicl_prefix_queried_tokens",
            "Prompt tokens looked up in the cache",
            stats.queried_tokens,
        ),
        ("bicl_prefix_hit_tokens", "Prompt tokens found in the cache", stats.hit_tokens),
        ("bicl_block_hits", "Pages of prompts found in some tier", stats.block_hits),
        ("bicl_block_misses", "Pages computed before and held no more", stats.block_misses),
        (
            "bicl_page_tag_mismatches",
            "Cached pages without their tag, computed anew",
            stats.tag_mismatches,
        ),
        (
            "bicl_evicted_page_age_seconds",
            "Sum over evicted pages of the time since their last use",
            stats.evicted_age_ms / 1000,
        ),
        ("bicl_evicted_pages", "Cached pages given up for new ones", stats.evicted_pages),
        ("bicl_preemptions", "Running requests put back into the queue", stats.preemptions),
        ("bicl_cache_rebuilds", "Times that page bookkeeping began anew", stats.cache_rebuilds),
        ("bicl_prefilled_tokens", "Prompt tokens computed", stats.prefilled_tokens),
        ("bicl_generated_tokens", "Tokens generated", stats.generated_tokens),
        ("bicl_cuda_graph_misses", "Decode steps without a captured graph", stats.graph_misses),
        (
            "bicl_unwidened_prefills",
            "Layers of prefill steps (not of rows) whose fp8 pages could not be widened",
            stats.unwidened_prefills,
        ),
    ):
        yield CounterMetricFamily(name, text, value=value)
    steps = CounterMetricFamily(
        "bicl_step_seconds", "Time of forward steps with their sampling", labels=["step"]
    )
    steps.add_metric(["prefill"], stats.prefill_time)
    steps.add_metric(["decode"], stats.decode_time)
    yield steps
    stores = CounterMetricFamily(
        "bicl_reordering_exposed_seconds",
        "Most of that time that writing pages took and nothing hid",
        labels=["step"],
    )
    stores.add_metric(["prefill"], stats.prefill_store_time)
    stores.add_metric(["decode"], stats.decode_store_time)
    yield stores
    outcomes = CounterMetricFamily("bicl_requests", "Requests by outcome", labels=["outcome"])
    outcomes.add_metric(["finished"], stats.finished)
    outcomes.add_metric(["aborted"], stats.aborted)
    outcomes.add_metric(["failed"], stats.failed)
    yield outcomes


def _told(facts: CacheFacts, stats: EngineStats) -> Iterator[Metric]:
    text = "1 if pages are shared between requests"
    yield gauge("bicl_reuse_enabled", text, float(facts.reuse_enabled))
    info = GaugeMetricFamily("bicl_info", "What runs", labels=list(facts.labels))
    info.add_metric(list(facts.labels.values()), 1)
    yield info
    fallbacks = GaugeMetricFamily(
        "bicl_fallback", "What runs otherwise than asked", labels=["reason"]
    )
    for reason in (*facts.fallbacks, *stats.fallbacks):
        fallbacks.add_metric([reason], 1)
    yield fallbacks
