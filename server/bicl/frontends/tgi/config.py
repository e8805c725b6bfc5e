"""What the launcher shim (or the operator) tells a shard through the environment."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bicl.cache.settings import CHOICE_PAGE_SIZE, PAGE_SIZE, parse_memory
from bicl.errors import ConfigError
from bicl.sparse.config import HySparseConfig
from bicl.sparse.guard import GuardBounds
from bicl.sparse.settings import HySparseSettings

__all__ = ["ATTENTION", "BLOCK_SIZES", "OverlayConfig", "overlay_config"]

ATTENTION = "flashdecoding"
"""TGI's name for attention over a paged cache with prefix caching; its router knows no other."""

BLOCK_SIZES = (32, 64)

HOST_SIZE, DISK_DIR, DISK_SIZE = "HOST_CACHE_SIZE", "DISK_CACHE_DIR", "DISK_CACHE_SIZE"

_TRUE, _FALSE = ("1", "true"), ("", "0", "false")


@dataclass(frozen=True)
class OverlayConfig:
    """Settings of one shard.

    Attributes:
        block_size: tokens a page, ``BICL_BLOCK_SIZE``.
        deterministic: results that do not depend on batch mates, ``BICL_DETERMINISTIC``.
        verify_prefixes: use a cached prefix only if its pages carry its tokens' tags,
            ``BICL_VERIFY_PREFIXES`` (default on).
        poison: fill new pages with NaN, so that a read of an unwritten slot shows,
            ``BICL_DEBUG_POISON``.
        host_cache_bytes: host memory below the pages, of all ranks together; 0: none.
            ``BICL_HOST_CACHE_SIZE``: 64GiB, or a share of the free memory such as 50%.
        disk_cache_dir, disk_cache_bytes: disk below that, of all ranks together,
            ``BICL_DISK_CACHE_DIR`` and ``BICL_DISK_CACHE_SIZE``; None: none.
        hysparse: ``BICL_ENABLE_HYSPARSE`` and ``BICL_HYSPARSE_*``; ``None``: off.
        guard: when the shard then goes back to the full cache.
        metrics_port: rank r serves its counters on port + r, ``BICL_METRICS_PORT``; 0: nowhere.
    """

    block_size: int = PAGE_SIZE
    deterministic: bool = False
    verify_prefixes: bool = True
    poison: bool = False
    metrics_port: int = 0
    host_cache_bytes: int = 0
    disk_cache_dir: Path | None = None
    disk_cache_bytes: int = 0
    hysparse: HySparseConfig | None = None
    guard: GuardBounds = field(default_factory=GuardBounds)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> OverlayConfig:
        """Raises ConfigError naming the variable, its value and what is allowed."""
        sparse = HySparseSettings.from_environment(environment)
        # Of "auto", where no launcher has looked at the model's config.
        default = CHOICE_PAGE_SIZE if sparse.enable_hysparse else PAGE_SIZE
        host_bytes, folder, disk_bytes = _tiers(environment)
        return cls(
            block_size=_block_size(environment.get("BICL_BLOCK_SIZE", "auto"), default),
            deterministic=_flag(environment, "BICL_DETERMINISTIC", False),
            verify_prefixes=_flag(environment, "BICL_VERIFY_PREFIXES", True),
            poison=_flag(environment, "BICL_DEBUG_POISON", False),
            metrics_port=_port(environment.get("BICL_METRICS_PORT", "0")),
            host_cache_bytes=host_bytes,
            disk_cache_dir=folder,
            disk_cache_bytes=disk_bytes,
            hysparse=sparse.resolve(),
            guard=sparse.guard(),
        )


@functools.cache
def overlay_config() -> OverlayConfig:
    """This process's settings, read once."""
    return OverlayConfig.from_environment(os.environ)


def _block_size(text: str, default: int) -> int:
    if text == "auto":
        return default
    if text not in map(str, BLOCK_SIZES):
        raise ConfigError(f"BICL_BLOCK_SIZE is {text!r}; use one of 32, 64, auto")
    return int(text)


def _tiers(environment: Mapping[str, str]) -> tuple[int, Path | None, int]:
    """Bytes of the host tier, folder and bytes of the disk tier."""
    host, folder, disk = (
        environment.get(f"BICL_{name}", "") for name in (HOST_SIZE, DISK_DIR, DISK_SIZE)
    )
    if host in ("", "0") and (folder or disk):
        raise ConfigError(
            f"BICL_{DISK_DIR} and BICL_{DISK_SIZE} need BICL_{HOST_SIZE}: the disk is read and "
            "written through host memory"
        )
    if bool(folder) != bool(disk):
        raise ConfigError(f"BICL_{DISK_DIR} and BICL_{DISK_SIZE} belong together; give both")
    if host not in ("", "0") and not _flag(environment, "BICL_VERIFY_PREFIXES", True):
        raise ConfigError(
            "BICL_HOST_CACHE_SIZE with BICL_VERIFY_PREFIXES=0: pages come back by the tags that "
            "are then not kept; unset one of them"
        )
    host_bytes = disk_bytes = 0
    if host not in ("", "0"):
        import psutil

        free = int(psutil.virtual_memory().available)
        host_bytes = parse_memory(host, free, f"BICL_{HOST_SIZE}")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        disk_bytes = parse_memory(disk, free, f"BICL_{DISK_SIZE}")
    return host_bytes, Path(folder) if folder else None, disk_bytes


def _flag(environment: Mapping[str, str], name: str, default: bool) -> bool:
    text = environment.get(name)
    if text is None:
        return default
    if text.lower() not in _TRUE + _FALSE:
        raise ConfigError(f"{name} is {text!r}; use 1 or 0")
    return text.lower() in _TRUE


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise ConfigError(f"BICL_METRICS_PORT is {text!r}; use a port number, or 0 for none")
    return int(text)
