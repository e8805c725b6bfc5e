"""How much memory the pool gets, and the tiers below it."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import torch

from bicl.attention.widening import ROOM_BYTES
from bicl.cache.layout import PageLayout
from bicl.cache.settings import KVCacheConfig, parse_memory
from bicl.errors import ConfigError
from bicl.frontends.http.engine.config import EngineConfig
from bicl.frontends.http.loader import LoadedModel
from bicl.memory import free_host_memory
from bicl.sparse.index import index_bytes
from bicl.sparse.refusals import ModelFacts, check_model

__all__ = [
    "disk_cache_bytes",
    "free_bytes",
    "group_pages",
    "host_cache_bytes",
    "num_pages",
    "page_bytes",
    "page_layouts",
    "reserve_pages",
    "sparse_layers",
]

HOST_SHARE, HOST_MOST = 0.25, 64 << 30
"""Of the free host memory, for the tier below a GPU's pool, and no more than that unasked: every
GiB takes about half a second to page-lock at start."""

DEFAULT_SHARE = {"cpu": 0.4, "cuda": 0.85}
"""Of the memory free after loading. The rest is for activations and logits."""


def free_bytes(device: torch.device) -> int:
    """Memory that could be allocated on the device now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_host_memory()


def page_layouts(loaded: LoadedModel, config: EngineConfig) -> list[PageLayout]:
    """One page layout a layer."""
    return loaded.geometry.layouts(
        config.kv_dtype or loaded.dtype,
        page_size=config.page_size,
        tile=config.page_size,
        swizzle=loaded.device.type == "cuda",
    )


def page_bytes(loaded: LoadedModel, config: EngineConfig) -> int:
    """Bytes that a page's worth of tokens takes in all layers together: with what HySparse keeps
    beside it, or, in compact mode, without what it drops."""
    layouts = page_layouts(loaded, config)
    one = sum(layout.page_bytes for layout in layouts)
    if config.hysparse is None:
        return one
    layers = sparse_layers(loaded, config)
    if config.compact:
        dropped = sum(layouts[layer].page_bytes for layer in layers)
        return one - int(config.hysparse.sparsity_ratio * dropped)
    variant = config.hysparse.variant
    return one + sum(index_bytes(layouts[layer], variant, loaded.dtype) for layer in layers)


def group_pages(loaded: LoadedModel, config: EngineConfig, pages: int) -> dict[int, int]:
    """In compact mode: the layers of the second page group, and how many pages they have.

    What the kept tokens of ``pages`` full pages take, and one request that is still whole, beside
    what it will keep.
    """
    if not config.compact or config.hysparse is None:
        return {}
    kept = math.ceil((1.0 - config.hysparse.sparsity_ratio) * pages)
    count = kept + _longest(config) + reserve_pages(config)
    return dict.fromkeys(sparse_layers(loaded, config), count)


def reserve_pages(config: EngineConfig) -> int:
    """In compact mode: what the longest request keeps in the second page group."""
    if config.hysparse is None:
        return 0
    return math.ceil((1.0 - config.hysparse.sparsity_ratio) * _longest(config))


def _longest(config: EngineConfig) -> int:
    return -(-config.max_total_tokens // config.page_size)


def sparse_layers(loaded: LoadedModel, config: EngineConfig) -> tuple[int, ...]:
    """Numbers of the layers in which HySparse works: those of its settings without a window.

    Raises:
        ConfigError: there is none.
    """
    if config.hysparse is None:
        return ()
    windows = tuple(
        None if layer.window_left < 0 else layer.window_left + 1 for layer in loaded.geometry.layers
    )
    facts = ModelFacts(len(windows), windows=windows)
    return check_model(config.hysparse, facts).layers or ()


def num_pages(loaded: LoadedModel, config: EngineConfig) -> int:
    """Pages by ``config.num_pages``, ``config.cache_memory_bytes``, or a share of the free memory
    (but no more than a full batch can use).

    Raises:
        ConfigError: they do not hold one request of ``max_total_tokens``, or do not fit into the
            free memory.
    """
    one, free = page_bytes(loaded, config), free_bytes(loaded.device)
    free = max(0, free - _widening_bytes(loaded, config))
    whole = _whole_request_bytes(loaded, config)
    needed = _longest(config)
    if config.num_pages is not None:
        pages = config.num_pages
    elif config.cache_memory_bytes is not None:
        pages = (config.cache_memory_bytes - whole) // one
    else:
        share = (int(free * DEFAULT_SHARE[loaded.device.type]) - whole) // one
        pages = min(needed * config.max_batch_size, share)
    if pages * one + whole > free:
        raise ConfigError(
            f"the cache needs {pages * one + whole} bytes ({pages} pages), {free} are free; "
            f"at most {(free - whole) // one} pages would fit"
        )
    if pages < 1:
        raise ConfigError(
            f"one page needs {one} bytes, which the cache memory does not hold; give it more"
        )
    return pages


def _widening_bytes(loaded: LoadedModel, config: EngineConfig) -> int:
    """What prefills over fp8 pages take beside the pool, once for all layers of a page group."""
    dtype = config.kv_dtype or loaded.dtype
    if loaded.device.type != "cuda" or dtype.itemsize != 1:
        return 0
    return ROOM_BYTES * (2 if config.compact else 1)


def _whole_request_bytes(loaded: LoadedModel, config: EngineConfig) -> int:
    """In compact mode: the sparse layers' pages of the longest request, before it drops tokens,
    beside what it keeps."""
    if not config.compact:
        return 0
    layouts = page_layouts(loaded, config)
    layers = sparse_layers(loaded, config)
    # One page more, because a share of the others is rounded up.
    count = _longest(config) + reserve_pages(config) + 1
    return count * sum(layouts[layer].page_bytes for layer in layers)


def host_cache_bytes(cache: KVCacheConfig, device: torch.device) -> int:
    """Memory of the host tier by ``--host-cache-size``.

    Raises:
        ConfigError: more than is free.
    """
    free = free_host_memory()
    if cache.host_cache_size == "0" or cache.disable_prefix_caching:
        return 0
    if cache.host_cache_size != "auto":
        return parse_memory(cache.host_cache_size, free, "--host-cache-size")
    if device.type != "cuda" and cache.disk_cache_dir is None:
        return 0
    return min(int(free * HOST_SHARE), HOST_MOST)


def disk_cache_bytes(cache: KVCacheConfig) -> int:
    """Size of the disk tier by ``--disk-cache-size``; what is in the folder counts as free.

    Raises:
        ConfigError: the folder cannot be made, or has less room.
    """
    if cache.disk_cache_dir is None or cache.disk_cache_size is None:
        return 0
    folder = Path(cache.disk_cache_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        free = shutil.disk_usage(folder).free + held
    except OSError as error:
        raise ConfigError(f"--disk-cache-dir {folder} cannot be used: {error}") from error
    return parse_memory(cache.disk_cache_size, free, "--disk-cache-size")
