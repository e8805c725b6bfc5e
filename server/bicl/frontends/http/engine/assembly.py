"""The engine's parts that its config decides on: what manages pages, what decides on sparsity."""

from __future__ import annotations

from typing import Any

from bicl.cache.groups import GroupedManager
from bicl.cache.manager import CacheManager
from bicl.cache.tiers import PageTiers
from bicl.frontends.http.engine.compact import CompactControl
from bicl.frontends.http.engine.config import EngineConfig
from bicl.frontends.http.engine.prompts import PromptReader
from bicl.frontends.http.engine.runner import ModelRunner
from bicl.frontends.http.engine.sizing import reserve_pages, sparse_layers
from bicl.frontends.http.engine.sparse import SparseControl
from bicl.frontends.http.loader import LoadedModel
from bicl.sparse.compact import OBSERVED
from bicl.sparse.selection import least_skipped

__all__ = ["make_manager", "make_sparse_control"]


def make_manager(
    loaded: LoadedModel, config: EngineConfig, runner: ModelRunner, tiers: PageTiers | None
) -> CacheManager:
    """The bookkeeping of the runner's pages."""
    pages, size = runner.pool.num_pages, config.page_size
    shared: dict[str, Any] = {
        "prefix_cache": config.prefix_caching,
        "model_revision": loaded.sha,
        "eviction_policy": config.eviction_policy,
    }
    if runner.compact is None:
        return CacheManager(pages, size, tiers=tiers, **shared)
    group = next(iter(runner.compact.layers.values())).num_pages
    # The tokens that judge the others must be computed.
    return GroupedManager(
        pages,
        size,
        group_pages=group,
        reserve_pages=reserve_pages(config),
        tiers=tiers,
        min_computed_tokens=OBSERVED,
        **shared,
    )


def make_sparse_control(
    loaded: LoadedModel, config: EngineConfig, runner: ModelRunner, manager: CacheManager
) -> SparseControl | CompactControl | None:
    """What decides how sparse each row is; None: all are dense."""
    if config.hysparse is None:
        return None
    prompts = PromptReader(config.hysparse, config.guard, loaded.tokenizer)
    if runner.compact is not None:
        assert isinstance(manager, GroupedManager)
        return CompactControl(config.hysparse, runner.compact, manager, prompts)
    assert runner.shadow is not None
    layers = sparse_layers(loaded, config)
    layer = runner.pool.layers[layers[0]]
    return SparseControl(
        config.hysparse,
        config.guard,
        layers=layers,
        depth=len(loaded.geometry.layers),
        page_size=config.page_size,
        prompts=prompts,
        backend=runner.shadow,
        least_skipped=least_skipped(config.hysparse, layer.layout, loaded.device),
    )
