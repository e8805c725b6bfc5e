"""Decode steps with an index of their pages, and the choice of pages made on the GPU.

Index records that nobody computed are full of ``UNSET``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from support.cases import FP8_DTYPES, Step
from support.device import Truth, decode_step, truth_of
from torch.nn import functional as F

from bicl.attention.cuda import CudaBackend
from bicl.attention.metadata import AttentionMetadata
from bicl.attention.pool import LayerCache
from bicl.cache.layout import PageLayout
from bicl.ops.cuda import sparse
from bicl.sparse.config import STRATUM_TOKENS
from bicl.sparse.index import LayerIndex, make_indexes
from bicl.sparse.selection import SelectionRule, Strata
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
    *,
    after_store: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pages, lengths and positions; unused entries of the last are -7."""
    meta, layer = case.meta, case.step.layer
    shape = (meta.batch_size, layer.layout.num_kv_heads, meta.page_table.shape[1])
    positions = torch.full(shape, -7, dtype=torch.int32, device="cuda")
    pages, lengths = sparse.choose_tiles(
        case.step.query,
        layer,
        case.index,
        meta.page_table,
        meta.cache_seqlens,
        sparsity,
        rule,
        combine,
        scale=case.scale,
        positions=positions,
        after_store=after_store,
    )
    return pages, lengths, positions


def truth_of_choice(
    case: Indexed, read: torch.Tensor, positions: torch.Tensor, softcap: float = 0.0
) -> Truth:
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
        truths.append(truth_of(alone, scale=case.scale, softcap=softcap))
    return Truth(
        torch.cat([truth.out for truth in truths], dim=1),
        torch.cat([truth.lse for truth in truths]),
        torch.cat([truth.same_precision for truth in truths], dim=1),
    )


def rule_for(
    page_size: int, *, first: int = 1, recent: int = 2, floor: int = 4, max_k: int = 512
) -> SelectionRule:
    return SelectionRule(
        page_size=page_size,
        max_k=max_k,
        first=first,
        recent=recent,
        floor=floor,
        stratum=STRATUM_TOKENS // page_size,
    )


def assert_follows_rule(
    positions: torch.Tensor, num_tiles: torch.Tensor, kept: torch.Tensor, rule: SelectionRule
) -> None:
    """Whatever the scores: how many are listed, of which strata, and in what order.

    Args:
        positions: int32 ``[B, H, W]``, -7 where nothing is listed.
        num_tiles, kept: int32 ``[B]``.
    """
    batch, heads, width = positions.shape
    place = torch.arange(width, device=positions.device)
    own = rule.strata(num_tiles, kept, width)
    listed = (place < kept[:, None])[:, None]
    assert torch.equal(positions == -7, ~listed.expand(-1, heads, -1))
    assert bool(((positions >= 0) & (positions < width) | ~listed).all()), "no position"
    slots = torch.where(listed, positions, width).long()
    counts = torch.zeros(batch, heads, width + 1, dtype=torch.int32, device=positions.device)
    counts.scatter_add_(2, slots, torch.ones_like(positions))
    assert int(counts[..., :width].max()) <= 1, "a page is listed twice"
    # Which stratum each entry of a list has to be of: -1 at its ends, where the place is known.
    number = place - own.begin[:, None]
    needed = own.takes.sum(dim=1)
    picked = (number >= 0) & (number < needed[:, None]) & (kept < num_tiles)[:, None]
    of_entry = torch.searchsorted(own.takes.cumsum(dim=1), number.contiguous(), right=True)
    strata = torch.arange(own.places.shape[1], device=positions.device)
    of_page = torch.full((batch, width + 1), -1, device=positions.device)
    of_page.scatter_(
        1, own.places.flatten(1), strata.repeat_interleave(own.places.shape[2]).expand(batch, -1)
    )
    found = of_page[:, None].expand(-1, heads, -1).gather(2, slots)
    right = (found == of_entry[:, None]) | ~picked[:, None]
    assert bool(right.all()), "an entry is of another stratum"
    last = own.end[:, None] + place - own.begin[:, None] - needed[:, None]
    known = torch.where((number < 0) | (kept == num_tiles)[:, None], place, last)
    right = (positions == known[:, None]) | picked[:, None] | ~listed
    assert bool(right.all()), "the pages that do not compete are not in their places"


def assert_best_listed(
    positions: torch.Tensor,
    shares: torch.Tensor,
    own: Strata,
    sparse_rows: torch.Tensor,
    relative: float,
    absolute: torch.Tensor,
) -> None:
    """In each stratum no page that is listed is worse than one that is not, or than the one listed
    behind it, by more than a tolerance. The lists follow the rule already.

    Args:
        positions: int32 ``[B, H, W]``.
        shares: float32 ``[B, H, S, G]``, of ``stratum_shares``.
        own: of the rule.
        sparse_rows: bool ``[B]``, that leave something out.
        relative, absolute: tolerances, of the better share, and float32 ``[B, H, 1, 1]``.
    """
    batch, heads, width = positions.shape
    most = shares.shape[3]
    entries = shares.shape[2] * most
    place = torch.arange(width, device=positions.device)
    # Where in the strata each entry of a list stands; `entries` for those that do not compete.
    of_page = torch.full((batch, width + 1), entries, device=positions.device)
    numbers = torch.arange(entries, device=positions.device).expand(batch, -1)
    of_page = of_page.scatter_(1, own.places.flatten(1), numbers)[:, :width]
    picked = (place >= own.begin[:, None]) & (place < (own.begin + own.takes.sum(dim=1))[:, None])
    listed = torch.where(picked[:, None], positions, 0).long()
    entry = of_page[:, None].expand(-1, heads, -1).gather(2, listed)
    entry = torch.where(picked[:, None], entry, entries)

    def nearly(better: torch.Tensor) -> torch.Tensor:
        better = better.clamp_min(torch.finfo(better.dtype).min / 2)
        return (
            better
            - relative * better.abs()
            - absolute.view(batch, heads, *[1] * (better.dim() - 2))
        )

    taken = torch.zeros(batch, heads, entries + 1, dtype=torch.bool, device=positions.device)
    taken = taken.scatter_(2, entry, True)[..., :-1].view_as(shares)
    worst = shares.masked_fill(~taken, torch.inf).amin(dim=3)
    best = shares.masked_fill(taken, -torch.inf).amax(dim=3)
    right = (worst >= nearly(best)).flatten(1).all(dim=1)
    assert bool(right[sparse_rows].all()), "a better page was left out"
    share = F.pad(shares.flatten(2), (0, 1)).gather(2, entry)
    ahead, behind = entry[..., :-1], entry[..., 1:]
    together = (ahead // most == behind // most) & (behind < entries)
    ordered = (share[..., :-1] >= nearly(share[..., 1:])) | ~together
    assert bool(ordered.flatten(1).all(dim=1)[sparse_rows].all()), "a worse page comes first"


def everyone(meta: AttentionMetadata, share: float) -> torch.Tensor:
    return torch.full((meta.batch_size,), share, device="cuda")


def num_tiles(meta: AttentionMetadata, page_size: int) -> torch.Tensor:
    return (meta.cache_seqlens + page_size - 1) // page_size
