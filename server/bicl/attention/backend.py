"""The one object that runs attention: chosen once at start, never exchanged silently."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Protocol, cast

import torch

from bicl.attention.metadata import AttentionMetadata
from bicl.attention.pool import LayerCache
from bicl.attention.rotary import Rotary
from bicl.errors import BackendError

__all__ = ["BACKENDS", "AttentionBackend", "make_backend"]

BACKENDS = {
    "cpu": "bicl.attention.cpu:CpuBackend",
    "cuda": "bicl.attention.cuda:CudaBackend",
}
"""Name (a torch device type) to ``module:class``; the module is imported when it is asked for."""


class AttentionBackend(Protocol):
    """Operators over BICL pages. ``plan`` once a step, ``store`` and ``run`` once a layer."""

    name: str

    def plan(self, meta: AttentionMetadata) -> None:
        """Prepare a step. May launch one small kernel; never waits for the device."""

    def store(
        self,
        layer: LayerCache,
        key: torch.Tensor,
        value: torch.Tensor,
        slots: torch.Tensor,
        *,
        rotary: Rotary | None = None,
    ) -> None:
        """Write rows of K and V ``[T, H, head_dim]`` (last dim contiguous, any token and head
        stride) at ``slots`` (int64 ``[T]``; negative: skip). Padding dims are written as zeros.
        Slots may repeat (last or any writer wins).

        Args:
            rotary: turns its queries, in place, and the keys that are written; what it leaves in
                ``key`` is not defined.
        """

    def run(
        self,
        query: torch.Tensor,
        layer: LayerCache,
        meta: AttentionMetadata,
        *,
        scale: float,
        window_left: int = -1,
        window_right: int = -1,
        softcap: float = 0.0,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of ``query`` ``[T, num_q_heads, head_dim]`` over the pages of ``layer``.

        ``window_left`` counts keys before the query's own, inclusive (FlashAttention's meaning:
        ``W`` keeps ``W + 1`` keys); -1 is unlimited. ``softcap``: ``c * tanh(s / c)`` after
        scaling, before the mask; 0 is off. Queries that see no key give exactly zero, LSE -inf.

        Returns ``[T, num_q_heads, head_dim]`` in the query's dtype and, on request, the natural
        log-sum-exp of the scaled scores, float32 ``[num_q_heads, T]``.
        """

    def gather(
        self, layer: LayerCache, page_table: torch.Tensor, cache_seqlens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Pages to token-major K and V, each ``[sum(cache_seqlens), H, head_dim]`` packed."""

    def copy_pages(
        self, layers: list[LayerCache], source: torch.Tensor, target: torch.Tensor
    ) -> None:
        """Copy whole pages ``source[i] -> target[i]`` (int64 ``[n]``) in every layer."""


def make_backend(device: str | torch.device) -> AttentionBackend:
    """The backend for a device; call it once at start and pass the object on.

    Args:
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"`` or a ``torch.device``.

    Raises:
        BackendError: no such backend, this build does not contain it, or (raised by the backend
            itself) it does not fit this machine.
    """
    name = str(device).partition(":")[0]
    if name not in BACKENDS:
        raise BackendError(f"there is no attention backend {name!r}; use one of {list(BACKENDS)}")
    module, _, attribute = BACKENDS[name].partition(":")
    if find_spec(module) is None:
        raise BackendError(
            f"this build of bicl has no {name} backend ({module} is missing); "
            "install a wheel built with it, or use device 'cpu'"
        )
    return cast(AttentionBackend, getattr(import_module(module), attribute)())
