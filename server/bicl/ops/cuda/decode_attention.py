"""One query token a sequence over its pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bicl.ops.cuda.workspace import Workspace

if TYPE_CHECKING:
    from bicl.attention.pool import LayerCache

__all__ = ["decode_attention"]


def decode_attention(
    query: torch.Tensor,
    layer: LayerCache,
    page_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    workspace: Workspace,
    *,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
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

    Args:
        query: ``[B, num_q_heads, head_dim]`` fp16 or bf16, any strides but 1 in the last dim.
        page_table: int32 ``[B, max_pages]``, or ``[B, H, max_pages]`` where each KV head reads
            pages of its own, as many tokens for all.
        workspace: partial results; one stream at a time.
        deterministic: the result of a sequence depends on nothing but itself.
        pdl: start before the kernel ahead has ended. Only where that kernel writes nothing this
            one reads but ``query`` and each sequence's newest token.
        late_table: with ``pdl``: it also writes ``page_table`` and ``cache_seqlens``.
        force_sm80, force_cluster, force_grid: tests and benchmarks.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; the message names them.
        RuntimeError: the combination is not compiled in, or the launch failed.
    """
    workspace.decode_attention_on(layer)(
        out,
        lse,
        query,
        page_table,
        cache_seqlens,
        scale,
        softcap,
        window_left,
        deterministic,
        (2 if late_table else 1) if pdl else 0,
        force_sm80,
        force_cluster,
        force_grid,
    )
