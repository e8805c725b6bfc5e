"""What HySparse read and left out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from bicl.metrics.families import gauge
from bicl.sparse.guard import FALLBACK_REASONS

if TYPE_CHECKING:
    from bicl.frontends.http.engine.config import SparseStats

__all__ = ["sparse_metrics"]

_PATHS = ("sparse", "short", "little", "dense", "fallback")
_LAYER_GROUPS = ("first", "sparse", "last")


def sparse_metrics(stats: SparseStats) -> Iterator[Metric]:
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
        yield gauge(f"bicl_hysparse_{name}", text, value)
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
