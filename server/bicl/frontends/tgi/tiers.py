"""Host memory and disk below a shard's pages; see :mod:`bicl.cache.tiers`.

The router owns the page ids, so a page is never brought back into a place of our choosing: it goes
where the router put the request. Each rank keeps the pages of its own KV heads, and all agree on
the least that any of them can bring before a prefill begins.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bicl.attention.transfer import make_mover
from bicl.cache.keys import PageChain
from bicl.cache.tiers import Fetch, PageTiers, TierStats
from bicl.errors import ConfigError, TransferError
from bicl.frontends.tgi.config import OverlayConfig, overlay_config
from bicl.frontends.tgi.hysparse import shard_sparsity

__all__ = ["ShardTiers", "make_tiers"]

logger = logging.getLogger("bicl")

MEASURED_PAGES = 64
ENOUGH_TOKENS = 256  # of a prefill step, to learn the model's speed from it
SMOOTHING = 0.2


class ShardTiers:
    """The tiers of one rank.

    Args:
        tiers: over the pages of the model's caches, layer by layer.
        caches: of the layers; their stores wait for pages that are still on their way.
        group: process group of the ranks; None: there is only one.
    """

    def __init__(self, tiers: PageTiers, caches: Sequence[Any], group: Any = None) -> None:
        self._tiers = tiers
        self._group = group
        self._device = caches[0].layer.device
        self._coming: list[Fetch] = []
        for index, cache in enumerate(caches):
            cache.before_store = functools.partial(self._join, index)

    def claim(self, pages: Sequence[int]) -> None:
        """These pages are about to be written."""
        self._tiers.claim(pages)

    def bring(self, chain: PageChain, pages: Sequence[int], first: int, last: int) -> int:
        """Start to fill a request's pages ``first .. last`` (exclusive), as far as every rank can.

        Returns how many come for certain; each layer waits for its own in its next store. Every
        rank must call this for the same requests in the same order.
        """
        fetch = self._fetch(chain, pages, first, last) if first < last else None
        count = self._agree(0 if fetch is None else len(fetch.pages))
        if fetch is not None:
            self._coming.append(fetch)
        return count

    def save(self, chain: PageChain, pages: Sequence[int], first: int) -> None:
        """Keep pages that a step completed."""
        self._tiers.save(chain, pages, first)

    def end_step(self) -> None:
        """Pages that are there need no more waiting; others do, if their request broke off before
        its first step."""
        self._coming = [fetch for fetch in self._coming if not fetch.settled]

    def saw_prefill(self, tokens: int, seconds: float) -> None:
        """A step of prefill took so long: from then on it is known what a copy has to beat."""
        if tokens < ENOUGH_TOKENS:
            return
        costs, rate = self._tiers.costs, tokens / seconds
        known = costs.prefill_tokens_per_second or rate
        costs.prefill_tokens_per_second = known + SMOOTHING * (rate - known)

    def stats(self) -> TierStats:
        """Counters and gauges."""
        return self._tiers.stats()

    def settle(self, timeout: float) -> bool:
        """Wait until nothing is under way."""
        return self._tiers.settle(timeout)

    def close(self) -> None:
        """End its threads, before the pages are made anew."""
        self._tiers.close()

    def _fetch(self, chain: PageChain, pages: Sequence[int], first: int, last: int) -> Fetch | None:
        """Copies that cannot fail any more, or None."""
        near = first + self._tiers.num_in_host(chain, first, last)
        promotion = self._tiers.promote(chain, near, last)
        if promotion is not None and not promotion.wait(promotion.deadline - time.monotonic()):
            self._tiers.gave_up_late()
        reservation = self._tiers.reserve(chain, first, last)
        if promotion is not None:
            promotion.close()
        if not reservation.num_pages or not self._tiers.fetch_pays(reservation.num_pages):
            reservation.drop()
            return None
        fetch = reservation.start(pages[first : first + reservation.num_pages])
        if fetch.issued(self._tiers.num_layers):
            return fetch
        fetch.wait()  # what did start may still write into the pages
        return None

    def _agree(self, count: int) -> int:
        """The least of all ranks."""
        if self._group is None:
            return count
        least = torch.tensor([count], dtype=torch.int64, device=self._device)
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group=self._group)
        return int(least)

    def _join(self, layer: int) -> None:
        try:
            for fetch in self._coming:
                fetch.join(layer)
        except TransferError as error:
            raise RuntimeError(f"bicl: a copy from host memory broke off: {error}") from error


def make_tiers(model: Any) -> ShardTiers | None:
    """The tiers of a warmed-up TGI model; None if none are asked for.

    Raises:
        ConfigError: the model cannot use them, or the memory or the folder cannot be had.
    """
    config = overlay_config()
    if not config.host_cache_bytes:
        return None
    from text_generation_server.models.vlm_causal_lm import VlmCausalLM

    if isinstance(model, VlmCausalLM):
        raise ConfigError(
            f"BICL_HOST_CACHE_SIZE with the vision model {model.model_id}: two images have the "
            "same token ids; unset it"
        )
    layers = [[cache.layer.pages] for cache in model.kv_cache]
    if (sparsity := shard_sparsity()) is not None:
        for number, index in sparsity.indexes.items():
            layers[number].append(index.vectors)
    device = model.kv_cache[0].layer.device
    tiers = PageTiers(
        make_mover(layers),
        config.block_size,
        fingerprint=_fingerprint(model),
        host_bytes=config.host_cache_bytes // model.world_size,
        pinned=device.type == "cuda",
        disk_folder=_disk_folder(config, model.rank),
        disk_bytes=config.disk_cache_bytes // model.world_size,
    )
    tiers.measure(range(1, min(MEASURED_PAGES, layers[0][0].shape[0])))
    stats = tiers.stats()
    logger.info(
        "bicl: host cache of %d pages (%.1f GB), %.1f GB/s",
        stats.host_slots,
        stats.host_slots * tiers.costs.page_bytes / 1e9,
        tiers.costs.host_bytes_per_second / 1e9,
    )
    group = model.process_group if model.world_size > 1 else None
    return ShardTiers(tiers, model.kv_cache, group)


def _disk_folder(config: OverlayConfig, rank: int) -> Path | None:
    return None if config.disk_cache_dir is None else config.disk_cache_dir / f"rank{rank}"


def _fingerprint(model: Any) -> bytes:
    """Whatever must be equal for a page's bytes to mean the same: weights, layout, index, rank."""
    from text_generation_server.utils import weight_files

    files = weight_files(
        model.model_id, revision=getattr(model, "bicl_revision", None), extension=".safetensors"
    )
    weights = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in map(Path, files)]
    layouts = {repr(cache.layer.layout) for cache in model.kv_cache}
    scales = [(cache.layer.k_scale, cache.layer.v_scale) for cache in model.kv_cache]
    facts: tuple[Any, ...] = (model.model_id, weights, sorted(layouts), scales, str(model.dtype))
    if (sparsity := shard_sparsity()) is not None:
        facts += (sorted((number, each.meaning) for number, each in sparsity.indexes.items()),)
    ranks = (model.rank, model.world_size, model.num_layers)
    return hashlib.sha256(repr((facts, ranks)).encode()).digest()
