"""Packed rows of new tokens over pages: whole prompts, chunks on a cached prefix, single rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from bicl.ops.cuda import library

if TYPE_CHECKING:
    from bicl.attention.metadata import AttentionMetadata
    from bicl.attention.pool import LayerCache

__all__ = [
    "PrefillPlan",
    "PrefillPlanner",
    "plan_prefill",
    "prefill_attention",
    "uses_wgmma",
    "workspace_bytes",
]

MIN_TOKENS = 4096
MIN_BATCH = 64


@dataclass(frozen=True)
class PrefillPlan:
    """Which rows meet which keys in which order, on the device; good for every layer of a step
    with the same heads, head_dim and window. ``workspace`` also holds the partial results of tiles
    whose keys are split."""

    workspace: torch.Tensor
    num_tokens: int
    causal: bool
    window_left: int
    window_right: int
    force_sm80: bool


def workspace_bytes(
    num_tokens: int, batch: int, group: int, padded_head_dim: int, device: torch.device
) -> int:
    """Bytes that plans of at most ``num_tokens`` query tokens in ``batch`` sequences need."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(
        library.module().prefill_workspace_bytes(num_tokens, batch, group, padded_head_dim, index)
    )


def uses_wgmma(layer: LayerCache) -> bool:
    """Whether prefill over these pages runs on Hopper's wgmma: for those that it cannot take it is
    two to five times as slow."""
    return bool(library.module().prefill_uses_wgmma(layer.pages, layer.layout.page_size))


def plan_prefill(
    workspace: torch.Tensor,
    layer: LayerCache,
    cu_seqlens_q: torch.Tensor,
    cache_seqlens: torch.Tensor,
    *,
    num_tokens: int,
    num_q_heads: int,
    causal: bool = True,
    window_left: int = -1,
    window_right: int = -1,
    deterministic: bool = False,
    force_sm80: bool = False,
) -> PrefillPlan:
    """Makes the plan of a step: one small kernel, no wait for the device.

    Args:
        workspace: uint8, at least ``workspace_bytes``; overwritten. One stream at a time.
        cu_seqlens_q: int32 ``[B + 1]``; cache_seqlens: int32 ``[B]``; as in ``AttentionMetadata``.
        num_tokens: rows of ``query``; at least ``cu_seqlens_q[B]``.
        deterministic: never split a tile's keys: the bits of a row then depend on nothing but its
            own sequence, wherever chunks and prefixes were cut. Short queries on long prefixes
            are slower.
        force_sm80: tests and benchmarks.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; the message names them.
    """
    library.module().plan_prefill(
        workspace,
        layer.pages,
        cu_seqlens_q,
        cache_seqlens,
        layer.layout.page_size,
        num_tokens,
        num_q_heads,
        window_left,
        window_right,
        causal,
        deterministic,
        force_sm80,
    )
    return PrefillPlan(workspace, num_tokens, causal, window_left, window_right, force_sm80)


def prefill_attention(
    query: torch.Tensor,
    layer: LayerCache,
    page_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    plan: PrefillPlan,
    *,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    scale: float,
    softcap: float = 0.0,
    pdl: bool = False,
) -> None:
    """Writes ``out`` ``[T, num_q_heads, head_dim]`` and ``lse`` float32 ``[num_q_heads, T]``.

    Rows past ``cu_seqlens_q[B]`` are left as they are.

    Args:
        query: ``[T, num_q_heads, head_dim]`` fp16 or bf16; rows 16-byte aligned, any strides but
            1 in the last dim.
        plan: of this step, for this T, these heads and this window.
        pdl: start before the kernel ahead has ended; it is waited for before anything is read.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; the message names them.
        RuntimeError: the head_dim is not compiled in, or the launch failed.
    """
    library.module().prefill_attention(
        out,
        lse,
        query,
        layer.pages,
        page_table,
        cache_seqlens,
        plan.workspace,
        layer.layout.page_size,
        layer.k_scale,
        layer.v_scale,
        scale,
        softcap,
        plan.window_left,
        plan.window_right,
        plan.causal,
        pdl,
        plan.force_sm80,
    )


@dataclass(frozen=True)
class _Shape:
    """What layers that share a plan have in common."""

    device: torch.device
    num_q_heads: int
    num_kv_heads: int
    padded_head_dim: int
    dtype: torch.dtype
    page_size: int
    tile: int
    window_left: int
    window_right: int
    capturing: bool  # a plan recorded in a CUDA graph is made by its replay, not now


class PrefillPlanner:
    """The plans of the current step: made by the first layer that needs each, shared by the rest.

    Workspaces persist and only grow; graphs keep those they were captured with.

    Args:
        deterministic: see ``plan_prefill``.
    """

    def __init__(self, *, deterministic: bool = False) -> None:
        self.deterministic = deterministic
        self._meta: AttentionMetadata | None = None
        self._plans: dict[_Shape, PrefillPlan] = {}
        self._workspaces: dict[_Shape, torch.Tensor] = {}
        self._outgrown: list[torch.Tensor] = []

    def begin_step(self, meta: AttentionMetadata) -> None:
        """Forget earlier plans: the lengths have changed."""
        self._meta = meta
        self._plans.clear()

    def plan_for(
        self,
        query: torch.Tensor,
        layer: LayerCache,
        meta: AttentionMetadata,
        *,
        window_left: int = -1,
        window_right: int = -1,
    ) -> PrefillPlan:
        """The plan for ``query`` over ``layer`` in the step ``meta``."""
        if meta is not self._meta:
            self.begin_step(meta)
        layout = layer.layout
        shape = _Shape(
            layer.device,
            query.shape[1],
            layout.num_kv_heads,
            layout.padded_head_dim,
            layout.dtype,
            layout.page_size,
            layout.tile,
            window_left,
            window_right,
            torch.cuda.is_current_stream_capturing(),
        )
        plan = self._plans.get(shape)
        if plan is None or plan.num_tokens != query.shape[0]:
            plan = plan_prefill(
                self._workspace(shape, query.shape[0], meta.batch_size),
                layer,
                meta.cu_seqlens_q,
                meta.cache_seqlens,
                num_tokens=query.shape[0],
                num_q_heads=query.shape[1],
                causal=meta.causal,
                window_left=window_left,
                window_right=window_right,
                deterministic=self.deterministic,
            )
            self._plans[shape] = plan
        return plan

    def _workspace(self, shape: _Shape, num_tokens: int, batch: int) -> torch.Tensor:
        group = shape.num_q_heads // shape.num_kv_heads
        needed = workspace_bytes(num_tokens, batch, group, shape.padded_head_dim, shape.device)
        found = self._workspaces.get(shape)
        if found is not None and found.numel() >= needed:
            return found
        if found is not None:
            self._outgrown.append(found)
        roomy = workspace_bytes(
            max(num_tokens, MIN_TOKENS),
            max(batch, MIN_BATCH),
            group,
            shape.padded_head_dim,
            shape.device,
        )
        grown = torch.empty(roomy, dtype=torch.uint8, device=shape.device)
        self._workspaces[shape] = grown
        return grown
