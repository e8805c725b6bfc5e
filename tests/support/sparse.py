"""Decode steps with an index of their pages, and the choice of pages made on the GPU.

Index records that nobody computed are full of ``UNSET``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from support.cases import FP8_DTYPES, Step
from support.device import Truth, decode_step, truth_of

from bicl.attention.cuda import CudaBackend
from bicl.attention.metadata import AttentionMetadata
from bicl.attention.pool import LayerCache
from bicl.cache.layout import PageLayout
from bicl.ops.cuda import sparse
from bicl.sparse.index import LayerIndex, make_indexes
from bicl.sparse.selection import SelectionRule
from bicl.sparse.sgm import CENTROID_TOKENS

UNSET = 0xFF
"""NaN as float16."""

LENGTHS = {
    "edges": [0, 1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 257, 700],
    "alike": [4096] * 3,
    "one": [20001],
    "skewed": [20000, 1, 64, 700, 0, 333, 2049],
    "many": [(371 * i) % 3000 for i in range(60)],
}
STORED = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "bf16 on e4m3": (torch.bfloat16, FP8_DTYPES[0]),
    "fp16 on e5m2": (torch.float16, FP8_DTYPES[1]),
}


@dataclass(frozen=True)
class Indexed:
    step: Step
    index: LayerIndex
    scale: float

    @property
    def meta(self) -> AttentionMetadata:
        return self.step.meta


def indexed_step(
    backend: CudaBackend,
    lengths: list[int],
    layout: PageLayout,
    *,
    group: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    k_scale: float = 1.0,
) -> Indexed:
    step = decode_step(
        backend, lengths, layout, group=group, dtype=dtype, seed=seed, k_scale=k_scale
    )
    empty = make_indexes({0: step.layer}, "centroids", dtype)[0]
    empty.vectors.fill_(UNSET)
    index = replace(empty, weights=torch.rand(1, layout.head_dim, device="cuda") + 0.25)
    sparse.index_pages(step.layer, index, step.slots)
    return Indexed(step, index, layout.head_dim**-0.5)


def unpadded(records: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    """What of the records is written."""
    rows = layout.num_kv_heads * layout.page_size // CENTROID_TOKENS
    return records[:, : rows * (-(-layout.head_dim // 32) * 16 + 6)]


def choose(
    case: Indexed,
    sparsity: torch.Tensor,
    rule: SelectionRule,
    combine: str = "softmax",
    way: object = "by rule",
    *,
    after_store: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pages, lengths and positions; unused entries of the last are -7."""
    query, layer, meta = case.step.query, case.step.layer, case.meta
    heads = layer.layout.num_kv_heads
    shape = (meta.batch_size, heads, meta.page_table.shape[1])
    positions = torch.full(shape, -7, dtype=torch.int32, device="cuda")
    place = (meta.page_table, meta.cache_seqlens)
    if way == "split":
        scores = sparse.score_tiles(query, layer, case.index, *place, case.scale)
        pages, lengths = sparse.select_tiles(
            scores, *place, sparsity, rule, heads, combine, positions
        )
    else:
        pages, lengths = sparse.choose_tiles(
            query,
            layer,
            case.index,
            *place,
            sparsity,
            rule,
            combine,
            scale=case.scale,
            positions=positions,
            after_store=after_store,
            force_cluster=way if isinstance(way, int) else 0,
        )
    return pages, lengths, positions


def truth_of_choice(case: Indexed, read: torch.Tensor, positions: torch.Tensor) -> Truth:
    """Attention over the chosen keys alone; positions are not renumbered.

    Args:
        read: int32 ``[B]``, tokens.
        positions: int32 ``[B, H, max_pages]``, of the pages that hold them, the last one at the
            end.
    """
    layout, step = case.step.layer.layout, case.step
    size, group = layout.page_size, step.query.shape[1] // layout.num_kv_heads
    chosen = replace(case.meta, cache_seqlens=read)
    lengths, counts = case.meta.cache_seqlens.tolist(), (-(-read // size)).tolist()
    one = LayerCache(
        step.layer.pages,
        replace(layout, num_kv_heads=1),
        step.layer.k_scale,
        step.layer.v_scale,
    )
    truths = []
    for head in range(layout.num_kv_heads):
        tokens = []
        start = 0
        for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            kept = positions[row, head, :count].long()
            token = (kept[:, None] * size + torch.arange(size, device=kept.device)).reshape(-1)
            tokens.append(start + token[token < length])
            start += length
        picked = torch.cat(tokens)
        alone = replace(
            step,
            layer=one,
            meta=chosen,
            query=step.query[:, head * group : (head + 1) * group],
            key=step.key[picked, head : head + 1],
            value=step.value[picked, head : head + 1],
        )
        truths.append(truth_of(alone, scale=case.scale))
    return Truth(
        torch.cat([truth.out for truth in truths], dim=1),
        torch.cat([truth.lse for truth in truths]),
        torch.cat([truth.same_precision for truth in truths], dim=1),
    )


def rule_for(page_size: int, *, recent: int = 2, floor: int = 4, max_k: int = 512) -> SelectionRule:
    return SelectionRule(page_size=page_size, max_k=max_k, first=1, recent=recent, floor=floor)


def everyone(meta: AttentionMetadata, share: float) -> torch.Tensor:
    return torch.full((meta.batch_size,), share, device="cuda")


def num_tiles(meta: AttentionMetadata, page_size: int) -> torch.Tensor:
    return (meta.cache_seqlens + page_size - 1) // page_size
