"""HySparse in a shard of text-generation-inference: the deployment's ratio for every decode row.

The router passes no wish of a request on, so the ratio is one for all, and so is the way back: if
the live signals cross their bounds, the whole shard runs on the full cache from then on.
"""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from bicl.frontends.tgi.config import overlay_config
from bicl.frontends.tgi.kv_cache import shard_backend
from bicl.sparse.config import HySparseConfig
from bicl.sparse.gate_file import with_gate
from bicl.sparse.guard import Guard, GuardBounds, Signals
from bicl.sparse.index import LayerIndex
from bicl.sparse.refusals import ModelFacts, check_model
from bicl.sparse.selection import SelectionRule, least_skipped, tiles_by_layer
from bicl.sparse.shadow import ShadowBackend, make_shadow_backend

__all__ = ["ShardSparsity", "SparseCounters", "shard_sparsity", "watch"]

logger = logging.getLogger("bicl")

ROWS = 4096
"""Rows of the ratios' tensor, whose address captured graphs keep."""


@dataclass
class SparseCounters:
    """Monotonic; tiles are of one KV head, summed over rows, sparse layers and steps."""

    tiles_read: int = 0
    tiles_skipped: int = 0
    shadow_steps: int = 0
    stale_pages: int = 0
    fallbacks: int = 0
    little_steps: int = 0


class ShardSparsity:
    """One shard's HySparse.

    Args:
        config: of the deployment.
        bounds: of its live signals.
        page_size: tokens a page.

    Attributes:
        layers: the sparse ones; set by :meth:`check`.
        counters: since start.
        fallback: why the shard went back to the full cache; empty: it did not.
    """

    def __init__(self, config: HySparseConfig, bounds: GuardBounds, page_size: int) -> None:
        self.layers: tuple[int, ...] = ()
        self.counters = SparseCounters()
        self.fallback = ""
        self.index_share = 1.0
        self._config = config
        self._bounds = bounds
        self._page_size = page_size
        self._rule = SelectionRule.of(config, page_size)
        self._guard = Guard(bounds)
        self._backend: ShadowBackend | None = None
        self._ratios: torch.Tensor | None = None
        self._shares = torch.ones(1)
        self._steps = 0
        self._least_skipped = 1
        self._dense = False
        self._dense_graphs: dict[int, Any] = {}
        self._turn = 0
        self._random = random.Random(0)

    def check(self, model: Any) -> None:
        """Refuse a loaded model by name, and settle which of its layers are sparse and what judges
        their pages.

        Raises:
            ConfigError: naming the flag, the reason and the remedy.
        """
        from text_generation_server.utils.speculate import get_speculate

        raw = getattr(model, "config", None)
        facts = ModelFacts.from_config(
            {"num_hidden_layers": model.num_layers} | (raw.to_dict() if raw is not None else {}),
            model_id=model.model_id,
            chat_template=getattr(model.tokenizer, "chat_template", None),
            quantize=getattr(raw, "quantize", None),
            speculation=bool(get_speculate()),
        )
        found = check_model(self._config, facts)
        assert found.layers is not None
        self.layers = found.layers
        self._config = with_gate(self._config, model.model_id)
        for note in found.notes:
            logger.warning("bicl: %s", note)

    def attach(self, model: Any) -> None:
        """Index a model's new pages."""
        caches = model.kv_cache
        layers = [cache.layer for cache in caches]
        self._backend = make_shadow_backend(
            shard_backend(layers[0].device.type), self._config, layers, self.layers, model.dtype
        )
        for cache in caches:
            cache.backend = self._backend
        device = layers[0].device
        if self._ratios is None or self._ratios.device != device:
            self._ratios = torch.full((ROWS,), self._config.sparsity_ratio, device=device)
        indexes = self._backend.sparse.indexes
        self._shares = torch.tensor([indexes[number].share for number in self.layers])
        pages = sum(layer.layout.page_bytes for layer in layers)
        added = sum(each.bytes_per_page for each in indexes.values())
        self.index_share = pages / (pages + added)
        self._least_skipped = least_skipped(self._config, layers[self.layers[0]].layout, device)
        self._dense_graphs = {}  # of the pages before

    @property
    def indexes(self) -> Mapping[int, LayerIndex]:
        """By layer, what is kept beside the pages."""
        return {} if self._backend is None else self._backend.sparse.indexes

    def ratios(self, batch: int) -> torch.Tensor | None:
        """float32 ``[batch]`` at an address that never changes; ``None``: the step is dense.

        Raises:
            RuntimeError: more rows than any batch of a shard has.
        """
        if self._ratios is None or self._dense:
            return None
        if batch > ROWS:
            raise RuntimeError(f"bicl: a decode batch of {batch} rows; HySparse takes {ROWS}")
        return self._ratios[:batch]

    def read(self) -> dict[str, tuple[str, float]]:
        """Counters for Prometheus: name to help text and value."""
        now = self.counters
        return {
            f"bicl_hysparse_{name}": (text, value)
            for name, text, value in (
                ("read_tiles", "Tiles of a KV head read in sparse layers", now.tiles_read),
                ("skipped_tiles", "Tiles of a KV head left out", now.tiles_skipped),
                ("shadow_steps", "Steps in which sampled layers also ran dense", now.shadow_steps),
                ("little_steps", "Steps dense since choosing costs more", now.little_steps),
                ("stale_pages", "Pages whose index did not describe them", now.stale_pages),
                ("shard_fallbacks", "Times the shard went back to the full cache", now.fallbacks),
            )
        }

    # --- graphs ------------------------------------------------------------------------------
    def capture(self, model: Any, warm_up: Any, *args: Any, **kwargs: Any) -> None:
        """Run TGI's ``cuda_graph_warmup`` of one batch size twice: steps in which leaving tiles
        out would not pay have graphs without scoring."""
        with self._running_dense(model):
            warm_up(*args, **kwargs)
        warm_up(*args, **kwargs)

    @contextmanager
    def _running_dense(self, model: Any) -> Iterator[None]:
        graphs, model.cuda_graphs = model.cuda_graphs, self._dense_graphs
        self._dense = True
        try:
            yield
        finally:
            self._dense = False
            model.cuda_graphs = graphs

    # --- a decode step -----------------------------------------------------------------------
    def step(self, model: Any, batch: Any, run: Any) -> Any:
        """Run TGI's ``generate_token`` on a decode batch; now and then measure it."""
        lengths = [a + b for a, b in zip(batch.cache_lengths, batch.input_lengths, strict=True)]
        tiles = torch.tensor([-(-n // self._page_size) for n in lengths], dtype=torch.int32)
        ratio = 0.0 if self.fallback else self._config.sparsity_ratio
        kept = tiles_by_layer(tiles, torch.full((len(lengths),), ratio), self._rule, self._shares)
        skips = int((tiles - kept).sum())
        if skips < self._least_skipped * len(self.layers):
            self.counters.little_steps += skips > 0
            self.counters.tiles_read += int(tiles.sum()) * len(self.layers)
            with self._running_dense(model):
                return run(model, batch)
        self.counters.tiles_read += int(kept.sum())
        self.counters.tiles_skipped += skips
        self._steps += 1
        if (self._steps - 1) % self._bounds.shadow_interval:
            return run(model, batch)
        pages = [list(table) for table in batch.block_tables]
        graphs, model.cuda_graphs = model.cuda_graphs, {}  # a graph cannot be probed
        assert self._backend is not None
        probed = {len(self.layers) // 2, self._turn}
        self._backend.arm({self.layers[place] for place in probed})
        try:
            result = run(model, batch)
        finally:
            model.cuda_graphs = graphs
        self._learn(tiles, kept[sorted(probed)].float().mean(dim=0), lengths, pages)
        return result

    def _learn(
        self, tiles: torch.Tensor, kept: torch.Tensor, lengths: list[int], pages: list[list[int]]
    ) -> None:
        assert self._backend is not None
        probes = self._backend.disarm()
        rows = torch.nonzero(kept < tiles).flatten()
        self._turn = (self._turn + 1) % len(self.layers)
        tables = [pages[i][: lengths[i] // self._page_size] for i in rows]
        stale = sum(self._backend.audit(tables, self._random))
        self.counters.stale_pages += stale
        sparse = [p for p in probes.values() if p.mass_kept is not None]
        if not sparse or not len(rows):
            return
        here = rows.to(sparse[0].entropy.device)

        def mean(values: list[torch.Tensor]) -> float:
            return float(torch.stack(values)[:, here].float().mean())

        read = mean([p.tiles_read for p in sparse if p.tiles_read is not None])
        total = float(tiles[rows].float().mean())
        signals = Signals(
            expected=1.0 - float(kept[rows].float().mean()) / total,
            actual=1.0 - read / total,
            mass_kept=mean([p.mass_kept for p in sparse if p.mass_kept is not None]),
            entropy=mean([p.entropy for p in sparse]),
            stale_pages=stale,
        )
        self.counters.shadow_steps += 1
        if reason := self._guard.judge(signals):
            self._go_back(reason, signals)

    def _go_back(self, reason: str, signals: Signals) -> None:
        self.fallback = reason
        self.counters.fallbacks += 1
        assert self._ratios is not None
        self._ratios.zero_()  # captured graphs read it, too
        logger.error("bicl: HySparse: full cache from now on (%s: %s)", reason, signals)


@functools.cache
def shard_sparsity() -> ShardSparsity | None:
    """This process's HySparse; ``None``: off."""
    config = overlay_config()
    if config.hysparse is None:
        return None
    return ShardSparsity(config.hysparse, config.guard, config.block_size)


def watch(model_class: Any, sparsity: ShardSparsity) -> None:
    """Wrap TGI's FlashCausalLM; its subclasses inherit it."""
    generate_token, init_kv_cache = model_class.generate_token, model_class.init_kv_cache

    @functools.wraps(generate_token)
    def watched_generate_token(self: Any, batch: Any) -> Any:
        if batch.prefilling:
            return generate_token(self, batch)
        return sparsity.step(self, batch, generate_token)

    @functools.wraps(init_kv_cache)
    def indexing_init_kv_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = init_kv_cache(self, *args, **kwargs)
        sparsity.attach(self)
        if "cuda_graph_warmup" not in vars(self):  # of the instance: subclasses have their own
            warm_up = self.cuda_graph_warmup
            self.cuda_graph_warmup = functools.partial(sparsity.capture, self, warm_up)
        return result

    model_class.generate_token = watched_generate_token
    model_class.init_kv_cache = indexing_init_kv_cache
