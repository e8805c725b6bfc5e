"""Latent pages (MLA): rows into them, and one query token a sequence over them."""

from __future__ import annotations

import torch

from bicl.ops.cuda import library

__all__ = ["LatentWorkspace", "mla_decode", "store_latent"]


class LatentWorkspace:
    """Partial results and arrival counters of ``mla_decode``.

    Allocated once, outside CUDA graphs. Counters are zero between launches. Two streams must never
    run kernels over one workspace at the same time.

    Args:
        device: where the pages live.
        max_batch: largest number of sequences of a step.
        num_heads: largest number of query heads.
    """

    def __init__(self, device: torch.device | str, max_batch: int, num_heads: int) -> None:
        module = library.module()
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        num_bytes = int(module.mla_workspace_bytes(num_heads, num_sms))
        num_counters = int(module.mla_num_counters(max_batch, num_heads))
        self.partials = torch.empty(num_bytes // 4, dtype=torch.float32, device=device)
        self.counters = torch.zeros(num_counters, dtype=torch.int32, device=device)


def store_latent(pages: torch.Tensor, latent: torch.Tensor, slots: torch.Tensor) -> None:
    """Writes ``latent`` ``[T, 576]`` at ``slots`` (int64 ``[T]``, negative: skip).

    Args:
        pages: ``[num_pages, 1, 1, 9, 64, 64]``, fp16 or bf16.
        latent: the pages' dtype; rows 16-byte aligned.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; the message names them.
    """
    library.module().store_latent(latent, pages, slots)


def mla_decode(
    query: torch.Tensor,
    pages: torch.Tensor,
    page_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    workspace: LatentWorkspace,
    *,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Writes ``out`` ``[B, heads, 512]`` and ``lse`` float32 ``[heads, B]``.

    Args:
        query: ``[B, heads, 576]`` of the pages' dtype; rows 16-byte aligned.
        page_table: int32 ``[B, max_pages]``.
        cache_seqlens: int32 ``[B]``; 0: zeros, and -inf for the LSE.
        pdl: start before the kernel ahead has ended; it is waited for before anything is read.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; the message names them.
        RuntimeError: the card is not of compute capability 9.0, or the launch failed.
    """
    library.module().mla_decode(
        out,
        lse,
        query,
        pages,
        page_table,
        cache_seqlens,
        workspace.partials,
        workspace.counters,
        scale,
        pdl,
    )
