"""What the launcher shim (or the operator) tells a shard through the environment."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from bicl.errors import ConfigError
from bicl.sparse.config import HySparseConfig
from bicl.sparse.guard import GuardBounds
from bicl.sparse.settings import HySparseSettings

__all__ = ["ATTENTION", "BLOCK_SIZES", "OverlayConfig", "overlay_config"]

ATTENTION = "flashdecoding"
"""TGI's name for attention over a paged cache with prefix caching; its router knows no other."""

BLOCK_SIZES = (32, 64)
DEFAULT_BLOCK_SIZE = 64  # of "auto" where no launcher has looked at the model's config

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
        hysparse: ``BICL_ENABLE_HYSPARSE`` and ``BICL_HYSPARSE_*``; ``None``: off.
        guard: when the shard then goes back to the full cache.
        metrics_port: rank r serves its counters on port + r, ``BICL_METRICS_PORT``; 0: nowhere.
    """

    block_size: int = DEFAULT_BLOCK_SIZE
    deterministic: bool = False
    verify_prefixes: bool = True
    poison: bool = False
    metrics_port: int = 0
    hysparse: HySparseConfig | None = None
    guard: GuardBounds = field(default_factory=GuardBounds)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> OverlayConfig:
        """Raises ConfigError naming the variable, its value and what is allowed."""
        sparse = HySparseSettings.from_environment(environment)
        return cls(
            block_size=_block_size(environment.get("BICL_BLOCK_SIZE", "auto")),
            deterministic=_flag(environment, "BICL_DETERMINISTIC", False),
            verify_prefixes=_flag(environment, "BICL_VERIFY_PREFIXES", True),
            poison=_flag(environment, "BICL_DEBUG_POISON", False),
            metrics_port=_port(environment.get("BICL_METRICS_PORT", "0")),
            hysparse=sparse.resolve(),
            guard=sparse.guard(),
        )


@functools.cache
def overlay_config() -> OverlayConfig:
    """This process's settings, read once."""
    return OverlayConfig.from_environment(os.environ)


def _block_size(text: str) -> int:
    if text == "auto":
        return DEFAULT_BLOCK_SIZE
    if text not in map(str, BLOCK_SIZES):
        raise ConfigError(f"BICL_BLOCK_SIZE is {text!r}; use one of 32, 64, auto")
    return int(text)


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
