"""Which pages a decode step reads: index them when full, score them for a query, select.

The vectorised twin of ``csrc/sparse_select``. Apart from ``index_pages``, which reads pages on the
host, it runs on tensors of any device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from bicl.ops.cpu.addressing import plane_index
from bicl.ops.cpu.gather import PageLoader, Scratch

if TYPE_CHECKING:
    from bicl.attention.pool import LayerCache
    from bicl.sparse.index import LayerIndex
    from bicl.sparse.selection import SelectionRule

__all__ = [
    "bound_scores",
    "check_index",
    "choose_tiles",
    "combine_heads",
    "index_pages",
    "score_tiles",
    "select_tiles",
]


def check_index(index: LayerIndex) -> None:
    """Every kind of index is read here."""


def index_pages(layer: LayerCache, index: LayerIndex, slots: torch.Tensor) -> None:
    """Recompute the index rows of every page whose last slot is among ``slots``.

    Args:
        index: its ``vectors`` are mutated.
        slots: int64 ``[T]``; negative ones are skipped.
    """
    size = layer.layout.page_size
    full = slots[(slots >= 0) & (slots % size == size - 1)] // size
    if full.numel() == 0:
        return
    dtype = torch.float32 if layer.layout.element_bytes == 1 else layer.layout.dtype
    pages = plane_index(layer.layout, full.numpy()[:, None])
    loader = PageLoader(layer.layout, pages, len(full), dtype, Scratch())
    loader.load(layer.pages)
    keys = loader.rows[:, :, 0, :, : layer.layout.head_dim].float() * layer.k_scale
    index.vectors.index_copy_(0, full, index.describe(keys).to(index.vectors.dtype))


def score_tiles(
    query: torch.Tensor,
    layer: LayerCache,
    index: LayerIndex,
    page_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Estimates, for every query head, how much attention a page draws.

    Args:
        query: ``[B, Hq, D]``.
        page_table: int32 ``[B, W]``; entries past the length may hold anything.
        cache_seqlens: int32 ``[B]``.
        scale: of the attention scores.

    Returns:
        float32 ``[B, Hq, W]``, natural-log units. What stands at pages that are not full, or past
        the length, means nothing.
    """
    used = torch.arange(page_table.shape[1], device=query.device) * layer.layout.page_size
    table = torch.where(used < cache_seqlens[:, None], page_table, 0)
    vectors = index.vectors[table.long()].permute(0, 2, 1, 3, 4)  # [B, H, W, planes, dims]
    return index.score(query, vectors, scale)


def bound_scores(
    query: torch.Tensor, vectors: torch.Tensor, weights: torch.Tensor, scale: float
) -> torch.Tensor:
    """``scale * sum_d(a_d q_d mid_d + w_d |q_d| half_d)`` of boxes of keys.

    ``mid`` and ``half`` are centre and half width of the box; with ``a = w = 1`` this is the upper
    bound of Quest (arXiv 2406.10774), which a smaller ``w`` takes for the slack that it is.

    Args:
        query: ``[B, Hq, D]``.
        vectors: ``[B, H, W, 2, D]``, minimum and maximum.
        weights: float32 ``[2, D]``, ``a`` and ``w``.

    Returns:
        float32 ``[B, Hq, W]``.
    """
    batch, num_q_heads, dims = query.shape
    heads, width = vectors.shape[1], vectors.shape[2]
    centre = query.float() * weights[0]
    spread = query.float().abs() * weights[1]
    coefficients = torch.stack((centre - spread, centre + spread), dim=2) * (scale / 2)
    grouped = coefficients.view(batch, heads, num_q_heads // heads, 2 * dims)
    boxes = vectors.float().reshape(batch, heads, width, 2 * dims)
    return torch.einsum("bhgd,bhwd->bhgw", grouped, boxes).reshape(batch, num_q_heads, width)


def combine_heads(
    scores: torch.Tensor, candidate: torch.Tensor, num_kv_heads: int, combine: str
) -> torch.Tensor:
    """One score a KV head, from those of its query heads.

    Args:
        scores: float32 ``[B, Hq, W]``.
        candidate: bool ``[B, W]``.
        combine: ``softmax`` (of each head over the candidates, then summed), ``sum``, ``max``.

    Returns:
        float32 ``[B, H, W]``; what stands outside the candidates means nothing.
    """
    if combine == "softmax":
        scores = scores.masked_fill(~candidate[:, None], -torch.inf).softmax(dim=-1)
    grouped = scores.view(scores.shape[0], num_kv_heads, -1, scores.shape[2])
    return grouped.amax(dim=2) if combine == "max" else grouped.sum(dim=2)


def select_tiles(
    scores: torch.Tensor,
    page_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    sparsity: torch.Tensor,
    rule: SelectionRule,
    num_kv_heads: int,
    combine: str = "softmax",
    positions: torch.Tensor | None = None,
    keep: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The pages that each KV head reads: the first and recent ones and the best of the rest.

    Every head of a row keeps as many, its last page among them, so one length serves all.

    Args:
        scores: float32 ``[B, Hq, W]``.
        page_table: int32 ``[B, W]``.
        cache_seqlens: int32 ``[B]``.
        sparsity: float32 ``[B]``; 0 keeps every page.
        rule: how many pages, and which ones always.
        positions: int32 ``[B, H, W]``, filled with where the kept pages stand, if given.
        keep: bool ``[B, W]``, further positions that are always kept, as far as they fit.

    Returns:
        int32 ``[B, H, W]`` page ids, ascending by position, anything past the kept ones; int32
        ``[B]`` the tokens that they hold. Equal scores: the lower position wins.
    """
    position = torch.arange(page_table.shape[1], device=scores.device)
    num_tiles = (cache_seqlens + rule.page_size - 1) // rule.page_size
    used = position < num_tiles[:, None]
    candidate = (position >= rule.first) & (position < num_tiles[:, None] - rule.recent)
    share = combine_heads(scores, candidate, num_kv_heads, combine)
    # A damaged index may give anything; the pages kept always come before any of it.
    largest = torch.finfo(torch.float32).max
    share = share.nan_to_num(nan=-largest, posinf=largest, neginf=-largest)
    if keep is not None:
        share = share.masked_fill((used & keep)[:, None], torch.finfo(share.dtype).max)
    share = share.masked_fill((used & ~candidate)[:, None], torch.inf)
    share = share.masked_fill(~used[:, None], -torch.inf)
    kept = rule.tiles_to_keep(num_tiles, sparsity)
    order = share.sort(dim=-1, descending=True, stable=True).indices
    past = torch.where(position < kept[:, None, None], order, len(position))
    chosen = past.sort(dim=-1).values
    if positions is not None:
        positions.copy_(chosen)
    table = F.pad(page_table, (0, 1))[:, None].expand(-1, num_kv_heads, -1)
    pages = table.gather(2, chosen)
    lengths = cache_seqlens - (num_tiles - kept) * rule.page_size
    return pages, lengths.to(torch.int32)


def choose_tiles(
    query: torch.Tensor,
    layer: LayerCache,
    index: LayerIndex,
    page_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    sparsity: torch.Tensor,
    rule: SelectionRule,
    combine: str,
    *,
    scale: float,
    positions: torch.Tensor | None = None,
    after_store: bool = False,
    deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``score_tiles``, then ``select_tiles``. The last two are the kernels' affair."""
    scores = score_tiles(query, layer, index, page_table, cache_seqlens, scale)
    return select_tiles(
        scores,
        page_table,
        cache_seqlens,
        sparsity,
        rule,
        layer.layout.num_kv_heads,
        combine,
        positions,
    )
