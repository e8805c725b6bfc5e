"""Counters and gauges in Prometheus' text format. The only importer of its client.

``tgi_*``: names, types, units and bucket rules of TGI 3.3.7. ``bicl_*``: ours. What the engine
counts is read from one snapshot per scrape, so that the numbers of a scrape fit each other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
    start_http_server,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from bicl.cache.tiers import FAILURES, TierStats
from bicl.sparse.guard import FALLBACK_REASONS

if TYPE_CHECKING:
    from bicl.frontends.http.engine.config import EngineStats, Outcome, SparseStats, StepRecord

__all__ = ["CacheFacts", "RequestTimes", "ServerMetrics", "serve_counters"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_DURATION_BUCKETS = tuple(0.0001 * 1.5**power for power in range(1, 36))
_METHODS = ("prefill", "decode")
_PATHS = ("sparse", "short", "little", "dense", "fallback")
_LAYER_GROUPS = ("first", "sparse", "last")
_FAILURES = ("validation", "overloaded", "generation", "incomplete", "dropped", "template")
# Prometheus' client insists on a `_total` that TGI's counters do not have.
_TGI_COUNTER = re.compile(rb"^(# HELP |# TYPE |)(tgi_\w+?)_total(?=[ {])", re.MULTILINE)


@dataclass(frozen=True)
class RequestTimes:
    """Where a finished request's time went, in seconds."""

    total: float
    validation: float
    queue: float
    inference: float
    per_token: float


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


class ServerMetrics:
    """All metrics of one server. Also the engine's observer: called on its thread, never raises."""

    def __init__(self, max_input_tokens: int, max_total_tokens: int) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        hundredths = range(1, 101)
        inputs = tuple(max_input_tokens / 100 * step for step in hundredths)
        totals = tuple(max_total_tokens / 100 * step for step in hundredths)

        self._count = self._counter("tgi_request_count", "Total number of requests")
        self._success = self._counter("tgi_request_success", "Number of successful requests")
        self._failure = self._counter("tgi_request_failure", "Number of failed requests", "err")
        for reason in _FAILURES:
            self._failure.labels(reason)
        self._durations = {
            name: self._histogram(f"tgi_request_{name}_duration", text, _DURATION_BUCKETS)
            for name, text in (
                ("validation", "Time spent validating the request"),
                ("queue", "Time spent in the queue per request"),
                ("inference", "Request inference duration"),
                ("mean_time_per_token", "Mean time per token per request"),
            )
        }
        self._total = self._histogram(
            "tgi_request_duration", "Total time spent processing the request", _DURATION_BUCKETS
        )
        self._generated = self._histogram(
            "tgi_request_generated_tokens", "Generated tokens per request", totals
        )
        self._inputs = self._histogram(
            "tgi_request_input_length", "Input token length per request", inputs
        )
        self._max_new = self._histogram(
            "tgi_request_max_new_tokens", "Maximum new tokens per request", totals
        )
        self._skipped = self._histogram(
            "tgi_request_skipped_tokens", "Speculated tokens per request", (0.0, 1.0)
        )
        self._first_token = self._histogram(
            "bicl_time_to_first_token_seconds",
            "From a request's arrival to its first token",
            _DURATION_BUCKETS,
        )
        self._add_batch_metrics()

    def _add_batch_metrics(self) -> None:
        self._next_size = self._histogram(
            "tgi_batch_next_size",
            "Batch size of the next batch",
            tuple(float(size) for size in range(1, 1025)),
        )
        self._concat = self._counter("tgi_batch_concat", "Batches joined by new requests", "reason")
        self._batch_counters = {
            name: self._counter(f"tgi_batch_inference_{name}", text, "method")
            for name, text in (
                ("count", "Inference calls per method (prefill or decode)"),
                ("success", "Number of successful inference calls per method"),
                ("failure", "Number of failed inference calls per method"),
            )
        }
        self._batch_durations = {
            name: self._histogram(f"tgi_batch_{name}_duration", text, _DURATION_BUCKETS, "method")
            for name, text in (
                ("inference", "Batch inference duration"),
                ("forward", "Batch forward duration per method (prefill or decode)"),
                ("decode", "Time spent decoding a batch per method (prefill or decode)"),
                ("filter", "Time spent filtering batches and sending generated tokens"),
                ("concat", "Time spent joining batches"),
            )
        }
        for metric in (*self._batch_counters.values(), *self._batch_durations.values()):
            for method in _METHODS:
                metric.labels(method)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], *labels: str
    ) -> Histogram:
        return Histogram(name, text, labels, buckets=buckets, registry=self.registry)

    def attach(self, snapshot: Callable[[], EngineStats], facts: CacheFacts) -> None:
        """Publish an engine's snapshot and facts with every scrape."""
        self.registry.register(_EngineCollector(snapshot, facts))

    # --- the routes' side ----------------------------------------------------------------------
    def request_arrived(self, prompts: int = 1) -> None:
        self._count.inc(prompts)

    def request_failed(self, reason: str) -> None:
        self._failure.labels(reason).inc()

    def request_validated(self, input_length: int, max_new_tokens: int) -> None:
        self._inputs.observe(input_length)
        self._max_new.observe(max_new_tokens)

    def first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def request_succeeded(self, times: RequestTimes, generated_tokens: int) -> None:
        self._success.inc()
        self._total.observe(times.total)
        self._durations["validation"].observe(times.validation)
        self._durations["queue"].observe(times.queue)
        self._durations["inference"].observe(times.inference)
        self._durations["mean_time_per_token"].observe(times.per_token)
        self._generated.observe(generated_tokens)
        self._skipped.observe(0)

    # --- the engine's side ---------------------------------------------------------------------
    def on_admitted(self, queue_time: float, batch_size: int) -> None:
        self._next_size.observe(batch_size)
        if batch_size > 1:
            self._concat.labels("chunking").inc()

    def on_step(self, record: StepRecord) -> None:
        method = record.kind.value
        self._batch_counters["count"].labels(method).inc()
        self._batch_counters["success"].labels(method).inc()
        rest = max(0.0, record.total_time - record.forward_time - record.sample_time)
        for name, seconds in (
            ("inference", record.total_time),
            ("forward", record.forward_time),
            ("decode", record.sample_time),
            ("filter", rest),
        ):
            self._batch_durations[name].labels(method).observe(seconds)

    def on_outcome(self, outcome: Outcome) -> None:
        """Outcomes are published from the engine's snapshot."""

    def render(self) -> bytes:
        """The text of one scrape."""
        return _TGI_COUNTER.sub(rb"\1\2", generate_latest(self.registry))


class _EngineCollector:
    """Reads one snapshot a scrape."""

    def __init__(self, snapshot: Callable[[], EngineStats], facts: CacheFacts) -> None:
        self._snapshot = snapshot
        self._facts = facts

    def collect(self) -> Iterator[Metric]:
        stats = self._snapshot()
        yield from _tgi_gauges(stats, self._facts)
        yield from _cache_gauges(stats)
        yield from _engine_counters(stats)
        yield from _tier_metrics(stats)
        yield from _sparse_metrics(stats.sparse)
        yield from _constant_gauges(self._facts)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)


def _tgi_gauges(stats: EngineStats, facts: CacheFacts) -> Iterator[Metric]:
    yield _gauge("tgi_queue_size", "Current queue size", stats.queue_size)
    yield _gauge("tgi_batch_current_size", "Current batch size", stats.batch_size)
    yield _gauge(
        "tgi_batch_current_max_tokens",
        "Maximum tokens for the current batch",
        stats.batch_current_max_tokens,
    )
    text = "Maximum amount of tokens in total"
    yield _gauge("tgi_batch_max_total_tokens", text, facts.max_batch_total_tokens)


def _cache_gauges(stats: EngineStats) -> Iterator[Metric]:
    pages = GaugeMetricFamily("bicl_pages", "Pages of the cache by state", labels=["state"])
    pages.add_metric(["free"], stats.pages_free)
    pages.add_metric(["cached"], stats.pages_cached)
    pages.add_metric(["in_use"], stats.pages_in_use)
    pages.add_metric(["pinned"], stats.pages_pinned)
    pages.add_metric(["loading"], stats.pages_loading)
    yield pages
    yield _gauge("bicl_page_capacity", "Pages of the cache", stats.pages_total)
    usage = stats.pages_in_use / stats.pages_total if stats.pages_total else 0.0
    yield _gauge("bicl_cache_usage_ratio", "Pages in use over all pages", usage)
    yield _gauge(
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
        ("bicl_prefilled_tokens", "Prompt tokens computed", stats.prefilled_tokens),
        ("bicl_generated_tokens", "Tokens generated", stats.generated_tokens),
        ("bicl_cuda_graph_misses", "Decode steps without a captured graph", stats.graph_misses),
    ):
        yield CounterMetricFamily(name, text, value=value)
    outcomes = CounterMetricFamily("bicl_requests", "Requests by outcome", labels=["outcome"])
    outcomes.add_metric(["finished"], stats.finished)
    outcomes.add_metric(["aborted"], stats.aborted)
    outcomes.add_metric(["failed"], stats.failed)
    yield outcomes


def _sparse_metrics(stats: SparseStats) -> Iterator[Metric]:
    tiles = CounterMetricFamily(
        "bicl_hysparse_tiles",
        "Tiles of one KV head in sparse layers, summed over rows, layers and decode steps",
        labels=["state"],
    )
    tiles.add_metric(["read"], stats.tiles_read)
    tiles.add_metric(["skipped"], stats.tiles_skipped)
    yield tiles
    rows = CounterMetricFamily(
        "bicl_hysparse_rows", "Decode rows by the path that they took", labels=["path"]
    )
    for path in _PATHS:
        rows.add_metric([path], stats.rows.get(path, 0))
    yield rows
    fallbacks = CounterMetricFamily(
        "bicl_hysparse_fallbacks", "Requests that went back to the full cache", labels=["reason"]
    )
    for reason in FALLBACK_REASONS:
        fallbacks.add_metric([reason], stats.fallbacks.get(reason, 0))
    yield fallbacks
    for name, text, count in (
        ("shadow_steps", "Steps in which sampled layers also ran dense", stats.shadow_steps),
        ("stale_pages", "Pages whose index did not describe them", stats.stale_pages),
        ("compactions", "Times that a request's sparse layers gave up pages", stats.compactions),
        ("dropped_pages", "Pages of the sparse layers given up by them", stats.dropped_pages),
    ):
        yield CounterMetricFamily(f"bicl_hysparse_{name}", text, value=count)
    yield SummaryMetricFamily(
        "bicl_hysparse_mass_kept",
        "Share of the attention mass in the tiles read, by rows of shadow steps",
        count_value=stats.mass_kept_count,
        sum_value=stats.mass_kept_sum,
    )
    for name, text, value in (
        ("enabled", "1 if decode steps may leave tiles out", float(stats.enabled)),
        ("configured_sparsity_ratio", "Share of the tiles to leave out", stats.configured_ratio),
        ("actual_sparsity_ratio", "The same, measured by the last shadow step", stats.actual_ratio),
        ("mass_kept_ratio", "Attention mass kept in the last shadow step", stats.mass_kept),
    ):
        yield _gauge(f"bicl_hysparse_{name}", text, value)
    pages = GaugeMetricFamily(
        "bicl_hysparse_compact_pages", "Compact mode: the sparse layers' pages", labels=["state"]
    )
    for state in ("free", "cached", "in_use"):
        pages.add_metric([state], stats.compact_pages.get(state, 0))
    yield pages
    entropy = GaugeMetricFamily(
        "bicl_hysparse_attention_entropy_nats",
        "Order-2 entropy of the dense attention of one layer of a group, smoothed",
        labels=["layers"],
    )
    for group in _LAYER_GROUPS:
        entropy.add_metric([group], stats.entropy.get(group, math.nan))
    yield entropy


def _tier_metrics(stats: EngineStats) -> Iterator[Metric]:
    assert stats.tiers is not None
    hits = CounterMetricFamily(
        "bicl_tier_hit_tokens", "Prompt tokens found, by where", labels=["tier"]
    )
    pool = stats.hit_tokens - stats.host_hit_tokens - stats.disk_hit_tokens
    hits.add_metric(["device"], pool)
    hits.add_metric(["host"], stats.host_hit_tokens)
    hits.add_metric(["disk"], stats.disk_hit_tokens)
    yield hits
    yield from _copies_and_pages(stats.tiers)


def _copies_and_pages(tiers: TierStats) -> Iterator[Metric]:
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
    yield _gauge("bicl_tier_host_page_capacity", "Room of the host tier", tiers.host_slots)
    yield _gauge("bicl_tier_disk_bytes", "Bytes of the disk tier in use", tiers.disk_bytes)
    yield _gauge("bicl_tier_disk_max_bytes", "Bytes of the disk tier", tiers.disk_max_bytes)


def _constant_gauges(facts: CacheFacts) -> Iterator[Metric]:
    text = "1 if pages are shared between requests"
    yield _gauge("bicl_reuse_enabled", text, float(facts.reuse_enabled))
    info = GaugeMetricFamily("bicl_info", "What runs", labels=list(facts.labels))
    info.add_metric(list(facts.labels.values()), 1)
    yield info
    fallbacks = GaugeMetricFamily(
        "bicl_fallback", "What runs otherwise than asked", labels=["reason"]
    )
    for reason in facts.fallbacks:
        fallbacks.add_metric([reason], 1)
    yield fallbacks


def serve_counters(
    port: int,
    read: Callable[[], Mapping[str, tuple[str, float]]],
    labels: Mapping[str, str],
    tiers: Callable[[], TierStats | None],
) -> None:
    """Serve counters on a port of their own, for a process that has no HTTP server.

    Args:
        read: called for each scrape; name (without ``_total``) to help text and value.
        labels: of all of them.
        tiers: called for each scrape; what the tiers did, if there are any.
    """

    class _Counters:
        def collect(self) -> Iterator[Metric]:
            for name, (text, value) in read().items():
                family = CounterMetricFamily(name, text, labels=list(labels))
                family.add_metric(list(labels.values()), value)
                yield family
            if (stats := tiers()) is not None:
                yield from _copies_and_pages(stats)

    registry = CollectorRegistry()
    registry.register(_Counters())
    start_http_server(port, registry=registry)
