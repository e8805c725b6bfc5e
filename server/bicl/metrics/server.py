"""Metrics of the HTTP server: what requests and batches took, beside the engine's own counts."""

from __future__ import annotations

import re
from collections.abc import Callable
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
)

from bicl.metrics.engine import CacheFacts, EngineCollector

if TYPE_CHECKING:
    from bicl.frontends.http.engine.config import EngineStats, Outcome, StepRecord

__all__ = ["CONTENT_TYPE", "RequestTimes", "ServerMetrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_DURATION_BUCKETS = tuple(0.0001 * 1.5**power for power in range(1, 36))
_METHODS = ("prefill", "decode")
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
        self.registry.register(EngineCollector(snapshot, facts))

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
