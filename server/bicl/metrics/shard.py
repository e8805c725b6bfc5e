"""Metrics of a process that has no HTTP server: a shard of text-generation-inference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, Metric

from bicl.cache.tiers import TierStats
from bicl.metrics.tiers import copies_and_pages

__all__ = ["serve_counters"]


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
                yield from copies_and_pages(stats)

    registry = CollectorRegistry()
    registry.register(_Counters())
    start_http_server(port, registry=registry)
