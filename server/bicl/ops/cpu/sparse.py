"""Which pages a decode step reads: index them when full, score them for a query, select.

The vectorised twin of ``csrc/sparse_select``. Apart from ``index_pages``, which reads pages on the
host, it runs on tensors of any device.
"""

from __future__ import annotations

import math
from functools import lru_cache
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
    "centroid_rows",
    "centroid_scores",
    "check_index",
    "choose_tiles",
    "cluster_means",
    "combine_heads",
    "index_pages",
    "quantise_rows",
    "quantise_spreads",
    "score_tiles",
    "select_tiles",
    "stored_rows",
    "turned",
]

STEPS = 15
"""Between the least and the greatest dim of a centroid: 4 bits."""
EMPTY = -30.0
"""Logarithm of the size of a cluster without keys: nothing beside the cluster whose key it has."""


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
    index.vectors.index_copy_(0, full, index.describe(keys))


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
    return index.score(query, index.vectors[table.long()], scale)


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


def turned(rows: torch.Tensor) -> torch.Tensor:
    """``rows`` by a Hadamard matrix, orthonormal and its own inverse, in blocks of the greatest
    power of two in the row.

    It leaves products as they are, and spreads a dim that lies far out, whose range would make the
    steps of all others wide, over a whole block. Sums in the order of the kernel's.

    Args:
        rows: float32 ``[..., D]``.
    """
    dims = rows.shape[-1]
    block, apart = dims & -dims, 1
    while apart < block:
        a, b = rows.reshape(*rows.shape[:-1], -1, 2, apart).unbind(dim=-2)
        rows = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        apart *= 2
    return rows * math.sqrt(1.0 / block)


@lru_cache
def _turn(dims: int, device: torch.device) -> torch.Tensor:
    """float32 ``[dims, dims]``: :func:`turned` for few rows, at a fraction of its time."""
    with torch.inference_mode(mode=False):  # a fit differentiates through it
        return turned(torch.eye(dims, device=device))


def centroid_rows(keys: torch.Tensor, count: int) -> torch.Tensor:
    """What an index keeps of :func:`cluster_means`: the means turned, as they and the spreads are
    stored."""
    rows = cluster_means(keys, count)
    return stored_rows(
        *quantise_rows(turned(rows[..., :-2])), rows[..., -2], quantise_spreads(rows[..., -1])
    )


def quantise_rows(means: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row in 16 steps between its least and its greatest element.

    Args:
        means: float32 ``[..., D]``.

    Returns:
        Steps uint8 ``[..., D]`` and float16 ``[..., 2]``: an element is ``steps * a + b``.
    """
    low, high = means.amin(dim=-1), means.amax(dim=-1)
    count = low.new_full((), STEPS)  # by a Python number, CUDA would multiply by its inverse
    affine = torch.stack(((high - low) / count, low), dim=-1).half()
    step, least = affine.float().unsqueeze(-2).unbind(dim=-1)
    steps = ((means - least) / torch.where(step > 0, step, 1.0)).round().clamp(0, STEPS)
    return torch.where(step > 0, steps, 0.0).byte(), affine


def quantise_spreads(spreads: torch.Tensor) -> torch.Tensor:
    """As they are stored, float8_e5m2."""
    dtype = torch.float8_e5m2
    return spreads.clamp(max=torch.finfo(dtype).max).to(dtype)


def stored_rows(
    steps: torch.Tensor, affine: torch.Tensor, log_sizes: torch.Tensor, spreads: torch.Tensor
) -> torch.Tensor:
    """float32 ``[..., D + 2]`` of what :func:`quantise_rows` made, and of the clusters' sizes and
    spreads."""
    step, least = affine.float().unsqueeze(-2).unbind(dim=-1)
    facts = torch.stack((log_sizes, spreads.float()), dim=-1)
    return torch.cat((steps.float() * step + least, facts), dim=-1)


def cluster_means(keys: torch.Tensor, count: int) -> torch.Tensor:
    """Pages of keys as ``count`` clusters each: their means, the logarithms of their sizes, and
    their spreads, the mean square of what a dim of a key differs from the mean by.

    Clusters grow around keys that lie far apart (farthest first: the key farthest from the page's
    mean, then always the one farthest from those chosen), so that a key unlike all others, which
    a mean or a box would hide, has a row to itself. Each key belongs to the nearest of them.
    Equal distances: the earlier key, the earlier cluster. Float64, so that no rounding depends
    on how many pages are computed together.

    Args:
        keys: float32 ``[n, H, page_size, D]``, full pages.

    Returns:
        float32 ``[n, H, count, D + 2]``; identical keys leave clusters empty, whose size counts as
        ``exp(EMPTY)``.
    """
    points = keys.double()
    distance = (points - points.mean(dim=2, keepdim=True)).square().sum(dim=-1)
    member = torch.zeros(distance.shape, dtype=torch.int64, device=keys.device)
    seeds = []
    for cluster in range(count):
        farthest = distance.argmax(dim=-1)[..., None, None]
        seed = points.gather(2, farthest.expand(*farthest.shape[:3], keys.shape[3]))
        own = (points - seed).square().sum(dim=-1)
        nearer = own < distance if cluster else torch.ones_like(own, dtype=torch.bool)
        member.masked_fill_(nearer, cluster)
        distance = torch.where(nearer, own, distance)
        seeds.append(seed[:, :, 0])
    means, sizes = [], []
    for cluster, seed in enumerate(seeds):
        belongs = (member == cluster).double()
        size = belongs.sum(dim=-1, keepdim=True)
        mean = (points * belongs[..., None]).sum(dim=2) / size.clamp_min(1.0)
        means.append(torch.where(size > 0, mean, seed))
        sizes.append(size)
    centres, counts = torch.stack(means, dim=2), torch.cat(sizes, dim=-1)
    own = centres.gather(2, member[..., None].expand_as(points))
    off = (points - own).square().mean(dim=-1)
    parts = [torch.where(member == cluster, off, 0.0).sum(dim=-1) for cluster in range(count)]
    spreads = torch.stack(parts, dim=-1) / counts.clamp_min(1.0)
    logs = torch.where(counts > 0, counts.clamp_min(1.0).log(), EMPTY)
    return torch.cat((centres, torch.stack((logs, spreads), dim=-1)), dim=-1).float()


def centroid_scores(
    query: torch.Tensor, vectors: torch.Tensor, weights: torch.Tensor, scale: float
) -> torch.Tensor:
    """``log sum_i n_i exp(s_i + |g|^2 v_i / 2)`` with ``s_i = g c_i`` and ``g_d = scale a_d q_d``:
    what a page's keys would weigh in a softmax if those of a cluster lay around its centroid, in
    all directions alike, as far as they do on average.

    Args:
        query: ``[B, Hq, D]``.
        vectors: ``[B, H, W, rows, D + 2]``: centroids ``c``, turned, ``log n`` and spreads ``v``,
            see :func:`centroid_rows`.
        weights: float32 ``[D]``, ``a``.

    Returns:
        float32 ``[B, Hq, W]``.
    """
    batch, num_q_heads, dims = query.shape
    heads, width, rows = vectors.shape[1:4]
    grouped = (query.float() * weights * scale).view(batch, heads, num_q_heads // heads, dims)
    flat = vectors.float().reshape(batch, heads, width * rows, -1)
    turn = _turn(dims, query.device)
    scores = torch.einsum("bhgd,bhwd->bhgw", grouped @ turn, flat[..., :dims])
    reach = grouped.square().sum(dim=-1, keepdim=True) / 2
    scores += flat[:, :, None, :, dims] + reach * flat[:, :, None, :, dims + 1]
    return scores.view(batch, num_q_heads, width, rows).logsumexp(dim=-1)


def combine_heads(
    scores: torch.Tensor, scored: torch.Tensor, num_kv_heads: int, combine: str
) -> torch.Tensor:
    """One score a KV head, from those of its query heads.

    Args:
        scores: float32 ``[B, Hq, W]``.
        scored: bool ``[B, W]``, what a softmax runs over: the first pages too, although they do
            not compete, so that a head that looks at little else has little to say.
        combine: ``softmax`` (of each head, then summed), ``sum``, ``max``.

    Returns:
        float32 ``[B, H, W]``; what stands outside ``scored`` means nothing.
    """
    if combine == "softmax":
        scores = scores.masked_fill(~scored[:, None], -torch.inf).softmax(dim=-1)
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
        keep: bool ``[B, H or 1, W]``, further positions that are always kept, as far as they fit.

    Returns:
        int32 ``[B, H, W]`` page ids, ascending by position, anything past the kept ones; int32
        ``[B]`` the tokens that they hold. Equal scores: the lower position wins.
    """
    position = torch.arange(page_table.shape[1], device=scores.device)
    num_tiles = (cache_seqlens + rule.page_size - 1) // rule.page_size
    used = position < num_tiles[:, None]
    scored = position < num_tiles[:, None] - rule.recent
    always = used & ~(scored & (position >= rule.first))
    share = combine_heads(scores, scored, num_kv_heads, combine)
    # A damaged index may give anything; the pages kept always come before any of it.
    largest = torch.finfo(torch.float32).max
    share = share.nan_to_num(nan=-largest, posinf=largest, neginf=-largest)
    if keep is not None:
        share = share.masked_fill(used[:, None] & keep, torch.finfo(share.dtype).max)
    share = share.masked_fill(always[:, None], torch.inf)
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
        sparsity * index.share,
        rule,
        layer.layout.num_kv_heads,
        combine,
        positions,
    )
