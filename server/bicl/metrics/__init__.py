"""Counters and gauges in Prometheus' text format. The only importer of its client.

``tgi_*``: names, types, units and bucket rules of TGI 3.3.7. ``bicl_*``: ours. What the engine
counts is read from one snapshot per scrape, so that the numbers of a scrape fit each other.
"""

from bicl.metrics.engine import CacheFacts
from bicl.metrics.server import CONTENT_TYPE, RequestTimes, ServerMetrics
from bicl.metrics.shard import serve_counters

__all__ = ["CONTENT_TYPE", "CacheFacts", "RequestTimes", "ServerMetrics", "serve_counters"]
