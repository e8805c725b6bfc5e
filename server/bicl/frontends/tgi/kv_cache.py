"""``KVCache``, ``KVScales`` and ``get_kv_scales`` as TGI's models use them, over BICL pages."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from bicl.attention.backend import AttentionBackend, make_backend
from bicl.attention.metadata import AttentionMetadata
from bicl.attention.pool import KVPool
from bicl.cache.layout import PageLayout
from bicl.errors import BiclError
from bicl.frontends.tgi.config import overlay_config

__all__ = [
    "KVCache",
    "KVScales",
    "get_kv_scales",
    "nominal_share",
    "shard_backend",
    "unwidened_prefills",
]

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)

logger = logging.getLogger("bicl")


@dataclass
class KVScales:
    """What a stored key or value is multiplied by to recover it: scalar tensors, and as floats."""

    key_scale: torch.Tensor
    value_scale: torch.Tensor
    key_scale_cpu: float = field(init=False)
    value_scale_cpu: float = field(init=False)

    def __post_init__(self) -> None:
        for name in ("key_scale", "value_scale"):
            scale = getattr(self, name)
            if scale.numel() != 1:
                raise ValueError(f"{name} must be a scalar, got shape {list(scale.shape)}")
            setattr(self, f"{name}_cpu", float(scale))


def get_kv_scales(weights: Any, prefix: str) -> KVScales:
    """A layer's scales from its checkpoint: one for K and one for V, one for both, or 1."""
    names = [f"{prefix}.k_scale", f"{prefix}.v_scale"]
    if not all(weights.has_tensor(name) for name in names):
        names = [f"{prefix}.kv_scale"] * 2
    if not weights.has_tensor(names[0]):
        one = torch.ones((), dtype=torch.float32, device=weights.device)
        return KVScales(one, one)
    key, value = (weights.get_tensor(name, to_dtype=False).float() for name in names)
    return KVScales(key, value)


class KVCache:
    """One layer's pages. To TGI an opaque handle with one method.

    Args:
        num_blocks: pages.
        num_heads: KV heads on this rank.
        head_size: of K and V alike; padded up to a multiple of the tile.
        dtype: of the stored elements.
        device: where the pages live.

    Attributes:
        before_store: called first in every store that no graph has captured: pages on their way
            from the tiers must be there before the layer writes or reads any.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        num_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        global _latest_layout
        config = overlay_config()
        device = torch.device(device)
        layout = PageLayout(
            num_heads,
            head_size,
            dtype,
            page_size=config.block_size,
            tile=config.block_size,
            swizzle=device.type == "cuda",
        )
        fill = float("nan") if config.poison else None
        self.layer = KVPool([layout], num_blocks, device, fill=fill).layers[0]
        self.backend = shard_backend(device.type)
        self.slots = torch.empty(0, dtype=torch.int64, device=device)
        self.before_store: Callable[[], None] | None = None
        _latest_layout = layout

    @property
    def dtype(self) -> torch.dtype:
        return self.layer.layout.dtype

    def store(
        self,
        *,
        key: torch.Tensor,
        value: torch.Tensor,
        slots: torch.Tensor,
        kv_scales: KVScales,
    ) -> None:
        """Write this step's tokens. ``slots`` may be rewritten, and may repeat on page 0."""
        if self.before_store is not None:
            self.before_store()
        self._use_scales(kv_scales)
        self.slots = slots
        try:
            self.backend.store(self.layer, key, value, slots)
        except BiclError as error:
            raise RuntimeError(f"bicl: storing keys and values failed: {error}") from error

    def plan(self, meta: AttentionMetadata) -> None:
        """Prepare a step, once for all layers."""
        try:
            self.backend.plan(meta)
        except BiclError as error:
            raise RuntimeError(f"bicl: planning a step failed: {error}") from error

    def attend(
        self,
        query: torch.Tensor,
        meta: AttentionMetadata,
        *,
        scale: float,
        window_left: int,
        softcap: float | None,
    ) -> torch.Tensor:
        """Attention over what is stored; ``[T, heads, head_size]``, contiguous, query's dtype."""
        try:
            result = self.backend.run(
                query,
                self.layer,
                meta,
                scale=scale,
                window_left=window_left,
                softcap=softcap or 0.0,
            )
        except BiclError as error:
            # Of all exceptions only a RuntimeError makes TGI stop the shard.
            raise RuntimeError(f"bicl: attention failed: {error}") from error
        assert isinstance(result, torch.Tensor)
        return result

    def _use_scales(self, scales: KVScales) -> None:
        """Scales belong to the layer and never change; they only arrive with the first store."""
        if self.dtype not in FP8:
            return
        pair = (scales.key_scale_cpu, scales.value_scale_cpu)
        if pair == (self.layer.k_scale, self.layer.v_scale):
            _say_unscaled(pair == (1.0, 1.0))
            return
        self.layer = replace(self.layer, k_scale=pair[0], v_scale=pair[1])


_latest_layout: PageLayout | None = None


def nominal_share() -> float:
    """The share of a page that TGI's capacity arithmetic knows of: below 1 if heads are padded."""
    return 1.0 if _latest_layout is None else 1.0 - _latest_layout.padding_waste


_made: list[AttentionBackend] = []


def unwidened_prefills() -> int:
    """Layers of this process's prefill steps (one count each, however many rows a step has) whose
    fp8 pages could not be widened."""
    return sum(getattr(backend, "unwidened_prefills", 0) for backend in _made)


@functools.cache
def shard_backend(device_type: str) -> AttentionBackend:
    """The backend of this process."""
    _made.append(_make_backend(device_type))
    return _made[-1]


def _make_backend(device_type: str) -> AttentionBackend:
    if device_type != "cuda":
        return make_backend(device_type)
    from text_generation_server.utils.speculate import get_speculate

    from bicl.attention.cuda import CudaBackend

    # With drafts, tokens that this step stores can lie in pages that an early start would read.
    return CudaBackend(deterministic=overlay_config().deterministic, pdl=not get_speculate())


@functools.cache
def _say_unscaled(unscaled: bool) -> None:
    if unscaled:
        logger.warning(
            "bicl: the KV cache is fp8, but the checkpoint has no k_scale and v_scale; "
            "1.0 is used, and values beyond the type's range are clamped"
        )
