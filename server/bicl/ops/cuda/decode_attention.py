"""One query token a sequence over its pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bicl.ops.cuda import library
from bicl.ops.cuda.workspace import Workspace

if TYPE_CHECKING:
    from bicl.attention.metadata import AttentionMetadata
    from bicl.attention.pool import LayerCache

__all__ = [
    "DecodePlanner",
    "PlanKind",
    "decode_attention",
    "leaves_sms_idle",
    "plan_bytes",
    "plan_decode",
]

MIN_BATCH = 256
MIN_CLUSTER_SMS, MAX_CLUSTER = 128, 8


def decode_attention(
    query: torch.Tensor,
    layer: LayerCache,
    page_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    workspace: Workspace,
    *,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    plan: torch.Tensor | None = None,
    scale: float,
    window_left: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    pdl: bool = False,
    late_table: bool = False,
    force_sm80: bool = False,
    force_cluster: int = 0,
    force_grid: int = 0,
) -> None:
    """Writes ``out`` ``[B, num_q_heads, head_dim]`` and ``lse`` float32 ``[num_q_heads, B]``.

    Callers in a hurry hold on to ``Workspace.decode_attention_on`` instead.

    Args:
        query: ``[B, num_q_heads, head_dim]`` fp16 or bf16, any strides but 1 in the last dim.
        page_table: int32 ``[B, max_pages]``, or ``[B, H, max_pages]`` where each KV head reads
            pages of its own, as many tokens for all.
        workspace: partial results; one stream at a time.
        plan: of ``plan_decode`` for these lengths, this table, these heads and the same options:
            the same bits, 1 to 2 us sooner.
        deterministic: the result of a sequence depends on nothing but itself.
        pdl: start before the kernel ahead has ended. Only where that kernel writes nothing this
            one reads but ``query`` and each sequence's newest token.
        late_table: with ``pdl``: it may write anything, and is waited for before anything is read.
        force_sm80, force_cluster, force_grid: tests and benchmarks.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; the message names them.
        RuntimeError: the combination is not compiled in, or the launch failed.
    """
    options = (scale, softcap, window_left, deterministic, force_sm80, force_cluster, force_grid)
    early = (3 if late_table else 1) if pdl else 0
    run = workspace.decode_attention_on(layer, *options)
    run(out, lse, query, page_table, cache_seqlens, plan, early)


def plan_bytes(batch: int) -> int:
    """Bytes of any plan of a decode step of at most ``batch`` sequences."""
    return int(library.module().decode_plan_bytes(batch))


def leaves_sms_idle(num_pairs: int, num_sms: int) -> bool:
    """Whether clusters of 8 CTAs, one of each (sequence, KV head) pair, occupy at most half of the
    SMs, as they do on large cards where pairs are few (``csrc/decode_attention/schedule.h``)."""
    return num_sms >= MIN_CLUSTER_SMS and 2 * MAX_CLUSTER * num_pairs <= num_sms


def plan_decode(
    plan: torch.Tensor,
    layer: LayerCache,
    page_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    *,
    num_q_heads: int,
    window_left: int = -1,
    deterministic: bool = False,
    pdl: bool = False,
    force_sm80: bool = False,
    force_cluster: int = 0,
    force_grid: int = 0,
) -> None:
    """Works out on the device who computes which blocks and where those lie: one small kernel, no
    wait. Good for every layer with these heads, this layout, window and table, until the lengths
    change; without it each layer's kernel finds out by itself.

    Args:
        plan: uint8, at least ``plan_bytes``; overwritten.
        pdl: start before the kernel ahead has ended; it is waited for before anything is read.
        page_table, cache_seqlens, deterministic and the rest: as in ``decode_attention``.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; the message names them.
        RuntimeError: the combination is not compiled in, or the launch failed.
    """
    library.module().plan_decode(
        plan,
        layer.pages,
        layer.layout.page_size,
        page_table,
        cache_seqlens,
        num_q_heads,
        window_left,
        deterministic,
        pdl,
        force_sm80,
        force_cluster,
        force_grid,
    )


class PlanKind:
    """What layers that divide a step alike have in common. There is one object of a kind, so that
    a layer finds its plan by identity, whatever decides a kind.

    Args:
        num_q_heads, window_left: see ``plan_decode``.
    """

    __slots__ = ("num_q_heads", "window_left")

    def __init__(self, num_q_heads: int, window_left: int) -> None:
        self.num_q_heads = num_q_heads
        self.window_left = window_left


class DecodePlanner:
    """The plans of the current step: made by the first layer that needs each, shared by the rest.

    Steps that were not begun get none, since one layer alone is not worth it. Plans' memory
    persists and only grows; graphs keep what they were captured with.

    Args:
        deterministic, pdl: see ``plan_decode``.
    """

    def __init__(self, *, deterministic: bool = False, pdl: bool = False) -> None:
        self.deterministic = deterministic
        self.pdl = pdl
        self._meta: AttentionMetadata | None = None
        self._kinds: dict[tuple[object, ...], PlanKind] = {}
        # Those that were made, and those that are recorded in a CUDA graph: its replay makes them.
        self._plans: tuple[dict[PlanKind, torch.Tensor], ...] = ({}, {})
        self._memory: dict[tuple[PlanKind, bool], torch.Tensor] = {}
        self._outgrown: list[torch.Tensor] = []

    def begin_step(self, meta: AttentionMetadata) -> None:
        """Forget earlier plans: the lengths have changed."""
        self._meta = meta
        for plans in self._plans:
            plans.clear()

    def kind_of(self, layer: LayerCache, num_q_heads: int, window_left: int) -> PlanKind:
        """Worth keeping: it is the slow part of finding a plan."""
        layout = layer.layout
        key = (
            num_q_heads,
            window_left,
            layout.num_kv_heads,
            layout.padded_head_dim,
            layout.dtype,
            layout.page_size,
            layout.tile,
            layer.device,
        )
        return self._kinds.setdefault(key, PlanKind(num_q_heads, window_left))

    def plan_for(
        self, kind: PlanKind, layer: LayerCache, meta: AttentionMetadata
    ) -> tuple[torch.Tensor | None, bool]:
        """The plan for ``layer``, of this kind, in the step ``meta``, and whether the kernel that
        makes it has only now been launched."""
        if meta is not self._meta:
            return None, False
        capturing = torch.cuda.is_current_stream_capturing()
        plans = self._plans[capturing]
        plan = plans.get(kind)
        if plan is not None:
            return plan, False
        plan = self._memory_for((kind, capturing), meta.batch_size, layer.device)
        plan_decode(
            plan,
            layer,
            meta.page_table,
            meta.cache_seqlens,
            num_q_heads=kind.num_q_heads,
            window_left=kind.window_left,
            deterministic=self.deterministic,
            pdl=self.pdl,
        )
        plans[kind] = plan
        return plan, True

    def _memory_for(
        self, owner: tuple[PlanKind, bool], batch: int, device: torch.device
    ) -> torch.Tensor:
        found = self._memory.get(owner)
        if found is not None and found.numel() >= plan_bytes(batch):
            return found
        if found is not None:
            self._outgrown.append(found)
        size = plan_bytes(max(batch, MIN_BATCH))
        grown = torch.empty(size, dtype=torch.uint8, device=device)
        self._memory[owner] = grown
        return grown
