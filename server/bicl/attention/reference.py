"""The float32 truth: attention over pages, written from its definition. For tests only.

Everything here goes row by row in plain loops from the layout's own formula, shares no code with
any backend, and reads nothing but the slots that are valid.
"""

from __future__ import annotations

import math

import torch

from bicl.attention.metadata import AttentionMetadata
from bicl.attention.pool import LayerCache

__all__ = ["attention", "gather", "run", "store"]


def store(layer: LayerCache, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    """Write rows ``[T, H, head_dim]`` at ``slots``; negative slots are skipped, padding dims 0."""
    layout = layer.layout
    flat = layer.pages.view(-1)
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        for head in range(layout.num_kv_heads):
            for plane, (rows, scale) in enumerate(((key, layer.k_scale), (value, layer.v_scale))):
                row = torch.zeros(layout.padded_head_dim)
                row[: layout.head_dim] = rows[token, head].float()
                places = _places(layer, slot, head, plane)
                if layout.element_bytes == 1:
                    limit = torch.finfo(layout.dtype).max
                    row = (row / scale).clamp(-limit, limit)
                    stored = row.to(layout.dtype).view(torch.uint8)
                    flat.view(torch.uint8)[places] = stored
                else:
                    flat[places] = row.to(layout.dtype)


def _places(layer: LayerCache, slot: int, head: int, plane: int) -> torch.Tensor:
    """Element numbers of one row, all padded dims."""
    layout = layer.layout
    token = slot % layout.page_size
    first = layout.element_offset(slot - token, head, plane, 0)
    return torch.from_numpy(first + layout.plane_offsets[token])


def gather(
    layer: LayerCache, page_table: torch.Tensor, cache_seqlens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of all sequences, float32 ``[sum(cache_seqlens), H, head_dim]``.

    ``page_table`` may be ``[B, max_pages]`` or, a list a KV head, ``[B, H, max_pages]``.
    """
    layout = layer.layout
    flat = layer.pages.view(-1)
    rows: list[list[torch.Tensor]] = [[], []]
    for sequence, length in enumerate(cache_seqlens.tolist()):
        for token in range(length):
            page, offset = divmod(token, layout.page_size)
            lists = page_table[sequence].expand(layout.num_kv_heads, -1)
            slots = [int(own[page]) * layout.page_size + offset for own in lists]
            for plane, scale in enumerate((layer.k_scale, layer.v_scale)):
                heads = [
                    flat[_places(layer, slot, head, plane)[: layout.head_dim]].float() * scale
                    for head, slot in enumerate(slots)
                ]
                rows[plane].append(torch.stack(heads))
    empty = torch.empty(0, layout.num_kv_heads, layout.head_dim)
    key, value = (torch.stack(r) if r else empty for r in rows)
    return key, value


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    causal: bool,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence by the definition.

    Args:
        query: ``[q, num_q_heads, head_dim]``.
        key, value: ``[k, num_kv_heads, head_dim]``.

    Returns:
        float32 ``[q, num_q_heads, value_dim]`` and LSE ``[num_q_heads, q]``.
    """
    num_q, num_k = query.shape[0], key.shape[0]
    group = query.shape[1] // key.shape[1]
    key = key.float().repeat_interleave(group, dim=1)
    value = value.float().repeat_interleave(group, dim=1)
    out = torch.zeros(num_q, query.shape[1], value.shape[2])
    lse = torch.full((query.shape[1], num_q), -math.inf)
    for i in range(num_q):
        position = i + num_k - num_q
        last = position if causal else num_k - 1
        if window_right >= 0 and not causal:
            last = min(last, position + window_right)
        first = max(0, position - window_left) if window_left >= 0 else 0
        if last < first:
            continue
        seen = slice(first, last + 1)
        scores = torch.einsum("hd,khd->hk", query[i].float(), key[seen]) * scale
        if softcap > 0.0:
            scores = softcap * torch.tanh(scores / softcap)
        lse[:, i] = torch.logsumexp(scores, dim=-1)
        out[i] = torch.einsum("hk,khd->hd", torch.softmax(scores, dim=-1), value[seen])
    return out, lse


def run(
    query: torch.Tensor,
    layer: LayerCache,
    meta: AttentionMetadata,
    *,
    scale: float,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A whole step: float32 ``[T, num_q_heads, head_dim]`` and LSE ``[num_q_heads, T]``."""
    key, value = gather(layer, meta.page_table, meta.cache_seqlens)
    out = torch.zeros(query.shape)
    lse = torch.full((query.shape[1], query.shape[0]), -math.inf)
    starts = meta.cu_seqlens_q.tolist()
    first_key = 0
    for sequence, keys in enumerate(meta.cache_seqlens.tolist()):
        rows = slice(starts[sequence], starts[sequence + 1])
        span = slice(first_key, first_key + keys)
        first_key += keys
        out[rows], lse[:, rows] = attention(
            query[rows],
            key[span],
            value[span],
            scale=scale,
            causal=meta.causal,
            window_left=window_left,
            window_right=window_right,
            softcap=softcap,
        )
    return out, lse
