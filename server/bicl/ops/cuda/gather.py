"""Pages back to token-major rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bicl.ops.cuda import library

if TYPE_CHECKING:
    from bicl.attention.pool import LayerCache

__all__ = ["gather"]


def gather(
    layer: LayerCache,
    page_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    offsets: torch.Tensor,
    max_tokens: int,
    key: torch.Tensor,
    value: torch.Tensor,
) -> None:
    """Writes ``key`` and ``value`` ``[sum(cache_seqlens), H, head_dim]``, contiguous.

    Args:
        offsets: int64 ``[B]``, first output row of each sequence.
        max_tokens: host upper bound of ``cache_seqlens``.
        key, value: the pages' dtype (as stored), or fp32, fp16 or bf16 from fp8 (scaled).
    """
    library.module().gather(
        key,
        value,
        layer.pages,
        page_table,
        cache_seqlens,
        offsets,
        max_tokens,
        layer.layout.page_size,
        layer.k_scale,
        layer.v_scale,
    )
