"""Short forms of the client's metric families."""

from __future__ import annotations

from prometheus_client.core import GaugeMetricFamily

__all__ = ["gauge"]


def gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)
