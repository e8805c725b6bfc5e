"""What attention must know about one forward step, shared by all layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["AttentionMetadata"]


@dataclass(frozen=True)
class AttentionMetadata:
    """One packed step of prefill, extend and decode rows in any mixture.

    Sequence ``i`` owns query rows ``cu_seqlens_q[i] .. cu_seqlens_q[i+1]`` and attends to its first
    ``cache_seqlens[i]`` keys, which lie in the pages ``page_table[i]``. The causal mask is aligned
    to the bottom right corner: its last query sees every key. Table entries past
    ``ceil(cache_seqlens[i] / page_size)`` are never read and may hold anything.

    Attributes:
        page_table: int32 ``[B, max_pages]``, page ids. Decode steps may have one list a KV head,
            ``[B, H, max_pages]``, all with ``cache_seqlens`` tokens.
        cache_seqlens: int32 ``[B]``, tokens, including those stored in this step.
        cu_seqlens_q: int32 ``[B + 1]``, running sum of query lengths, from 0 to ``T``:
            every query row belongs to a sequence; padding rows are sequences of length 0.
        slot_mapping: int64 ``[T]``, where each new token's K and V go; -1 stores nothing.
        max_q: host upper bound of the query lengths.
        max_k: host upper bound of ``cache_seqlens``.
        causal: False lets every query see every key of its sequence.
        sparsity: float32 ``[B]``, the share of its pages that a sequence's decode step may leave
            out (0: none), in layers whose backend selects pages; None selects nowhere.
        num_decodes: leading sequences of one query each, in a step whose others have more: those
            may leave pages out all the same.
        keep: bool ``[B, max_pages]``, pages that such a backend always reads, by their place in
            ``page_table``; None: only those that it always reads anyway.
        compact: the same step in a second page group, whose layers may hold fewer tokens of a
            sequence: its tables, lengths and slots.

    All tensors are on the pool's device. Under a CUDA graph their addresses and the two host
    bounds are fixed and everything else is read on the device.
    """

    page_table: torch.Tensor
    cache_seqlens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    slot_mapping: torch.Tensor
    max_q: int
    max_k: int
    causal: bool = True
    sparsity: torch.Tensor | None = None
    num_decodes: int = 0
    keep: torch.Tensor | None = None
    compact: AttentionMetadata | None = None

    @property
    def batch_size(self) -> int:
        return self.cache_seqlens.shape[0]
