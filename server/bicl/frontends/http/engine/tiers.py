"""The engine's host and disk tiers: made from its config, measured at start."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable

from bicl.attention.transfer import make_mover
from bicl.cache.tiers import PageTiers, PageTwins
from bicl.frontends.http.engine.config import EngineConfig
from bicl.frontends.http.engine.runner import ModelRunner
from bicl.frontends.http.loader import LoadedModel

__all__ = ["make_tiers", "measure"]

log = logging.getLogger(__name__)

MEASURED_PAGES = 64
MEASURED_TOKENS = {"cpu": 128, "cuda": 2048}


def make_tiers(
    loaded: LoadedModel, config: EngineConfig, runner: ModelRunner, on_change: Callable[[], None]
) -> PageTiers | None:
    """The tiers that ``config`` asks for; None if it asks for none.

    Raises:
        ConfigError: they cannot be had; the message says what would work.
    """
    if not config.host_cache_bytes:
        return None
    twins = None
    if runner.compact is not None:
        group = runner.compact.layers
        twins = PageTwins(runner.pool.num_pages, next(iter(group.values())).num_pages, group)
    return PageTiers(
        make_mover(runner.page_tensors(), twins),
        config.page_size,
        fingerprint=_fingerprint(loaded, runner),
        host_bytes=config.host_cache_bytes,
        pinned=loaded.device.type == "cuda",
        disk_folder=config.disk_cache_dir,
        disk_bytes=config.disk_cache_bytes,
        policy=config.eviction_policy,
        on_change=on_change,
    )


def measure(tiers: PageTiers, config: EngineConfig, runner: ModelRunner) -> None:
    """Find out what a fetch and a prefill take here. The pool must be unused."""
    pages = min(MEASURED_PAGES, runner.pool.num_pages)
    tiers.measure(range(pages))
    tokens = min(
        MEASURED_TOKENS[runner.device.type],
        config.max_batch_prefill_tokens,
        config.max_total_tokens,
        runner.pool.num_pages * config.page_size,
    )
    costs = tiers.costs
    costs.prefill_tokens_per_second = tokens / runner.time_prefill(tokens)
    log.info(
        "pages come from host memory at %.1f GB/s (%.0f tokens/s), prefill computes %.0f tokens/s",
        costs.host_bytes_per_second / 1e9,
        costs.host_bytes_per_second / costs.page_bytes * costs.page_tokens,
        costs.prefill_tokens_per_second,
    )
    if tiers.has_disk and costs.disk_bytes_per_second:
        log.info(
            "pages come from disk at %.2f GB/s (%.0f tokens/s), at %.2f where the kernel has them",
            costs.disk_bytes_per_second / 1e9,
            costs.disk_bytes_per_second / costs.page_bytes * costs.page_tokens,
            costs.cached_bytes_per_second / 1e9,
        )


def _fingerprint(loaded: LoadedModel, runner: ModelRunner) -> bytes:
    """Names everything that gives a page's bytes their meaning."""
    digest = hashlib.sha256(f"{loaded.sha} {loaded.dtype} {loaded.device.type}\n".encode())
    for layer, tensors in zip(runner.pool.layers, runner.page_tensors(), strict=True):
        digest.update(f"{layer.layout} {layer.k_scale} {layer.v_scale}".encode())
        for tensor in tensors:
            digest.update(f" {tensor.dtype}{list(tensor.shape[1:])}".encode())
    if runner.shadow is not None:
        for number, index in runner.shadow.sparse.indexes.items():
            digest.update(f"\n{number} {index.meaning}".encode())
    return digest.digest()
