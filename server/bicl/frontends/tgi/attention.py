"""``attention`` and ``paged_attention`` with TGI's signatures, over BICL pages.

Both read everything from the cache, this step's own tokens too, so that results do not depend on
where a prompt was cut into chunks.
"""

from __future__ import annotations

from typing import Any

import torch

from bicl.attention.metadata import AttentionMetadata
from bicl.frontends.tgi.hysparse import shard_sparsity
from bicl.frontends.tgi.kv_cache import KVCache, KVScales

__all__ = ["SUPPORTS_WINDOWING", "attention", "paged_attention"]

SUPPORTS_WINDOWING = True


def attention(
    *,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: KVCache,
    kv_scales: KVScales,
    seqlen: Any,
    block_tables: torch.Tensor,
    softmax_scale: float,
    window_size_left: int = -1,
    causal: bool = True,
    softcap: float | None = None,
) -> torch.Tensor:
    """Prefill: chunks, fresh prompts and rows of one token in any mixture.

    ``window_size_left`` keeps W + 1 keys, as FlashAttention does.
    """
    meta = _step_metadata(seqlen, block_tables, kv_cache, seqlen.max_k, causal)
    return kv_cache.attend(
        query, meta, scale=softmax_scale, window_left=window_size_left, softcap=softcap
    )


def paged_attention(
    query: torch.Tensor,
    kv_cache: KVCache,
    kv_head_mapping: torch.Tensor,
    softmax_scale: float,
    block_tables: torch.Tensor,
    seqlen: Any,
    max_s: int,
    *,
    kv_scales: KVScales,
    softcap: float | None = None,
    window_size_left: int | None = -1,
) -> torch.Tensor:
    """Decode: one token a row; under speculation a request has several rows.

    The bound is ``max_s``: ``seqlen.max_k`` does not count the drafts.
    """
    meta = _step_metadata(seqlen, block_tables, kv_cache, max_s, True, decode=True)
    window = -1 if window_size_left is None else window_size_left
    return kv_cache.attend(query, meta, scale=softmax_scale, window_left=window, softcap=softcap)


def _step_metadata(
    seqlen: Any,
    block_tables: torch.Tensor,
    kv_cache: KVCache,
    max_k: int,
    causal: bool,
    *,
    decode: bool = False,
) -> AttentionMetadata:
    """The step's metadata, made by the first layer and kept on the object all layers share."""
    made: dict[tuple[bool, int], AttentionMetadata] = seqlen.__dict__.setdefault("_bicl_steps", {})
    meta = made.get((causal, max_k))
    if meta is None or meta.page_table is not block_tables:
        meta = AttentionMetadata(
            page_table=block_tables,
            cache_seqlens=seqlen.input_lengths + seqlen.cache_lengths,
            cu_seqlens_q=seqlen.cu_seqlen_q,
            slot_mapping=kv_cache.slots,
            max_q=seqlen.max_q,
            max_k=max_k,
            causal=causal,
            sparsity=_ratios(block_tables.shape[0]) if decode else None,
        )
        made[causal, max_k] = meta
        kv_cache.plan(meta)
    return meta


def _ratios(batch: int) -> torch.Tensor | None:
    sparsity = shard_sparsity()
    return None if sparsity is None else sparsity.ratios(batch)
