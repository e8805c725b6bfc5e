"""Which pages each KV head reads, by the scores of its query heads. Of any device."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from bicl.sparse.selection import SelectionRule, Strata

__all__ = ["combine_heads", "select_tiles", "stratum_shares"]


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
    """The pages that each KV head reads: the first and recent ones and the best of each stratum,
    see :mod:`bicl.sparse.selection`.

    Every head of a row keeps as many, its last page among them, so one length serves all. The
    softmax of a query head runs over the first pages and a stratum's own.

    Args:
        scores: float32 ``[B, Hq, W]``.
        page_table: int32 ``[B, W]``.
        cache_seqlens: int32 ``[B]``.
        sparsity: float32 ``[B]``; 0 keeps every page.
        rule: how many pages, which ones always, and which compete.
        positions: int32 ``[B, H, W]``, filled with where the kept pages stand, if given.
        keep: bool ``[B, W]``, further positions that are always kept, as far as they fit. In a row
            that has any all pages compete together, so that none is lost to a stratum's number.

    Returns:
        int32 ``[B, H, W]`` page ids, in the order of the rule, anything past the kept ones; int32
        ``[B]`` the tokens that they hold. Equal scores: the lower position wins.
    """
    num_tiles = (cache_seqlens + rule.page_size - 1) // rule.page_size
    kept = rule.tiles_to_keep(num_tiles, sparsity)
    chosen = _chosen(scores, num_tiles, kept, rule, num_kv_heads, combine)
    if keep is not None:
        together = replace(rule, stratum=0)
        with_kept = _chosen(scores, num_tiles, kept, together, num_kv_heads, combine, keep)
        chosen = torch.where(keep.any(dim=1)[:, None, None], with_kept, chosen)
    if positions is not None:
        positions.copy_(chosen)
    table = F.pad(page_table, (0, 1))[:, None].expand(-1, num_kv_heads, -1)
    pages = table.gather(2, chosen)
    lengths = cache_seqlens - (num_tiles - kept) * rule.page_size
    return pages, lengths.to(torch.int32)


def stratum_shares(
    scores: torch.Tensor, own: Strata, first: int, num_kv_heads: int, combine: str
) -> torch.Tensor:
    """What the pages of each stratum are compared by.

    Args:
        scores: float32 ``[B, Hq, W]``.
        own: of the rule for these rows.
        first: most first pages of a row, over which a softmax runs as well.

    Returns:
        float32 ``[B, H, S, G]``; -inf where a stratum has no page, and only there.
    """
    batch, num_q_heads, width = scores.shape
    count, most = own.places.shape[1:]
    place = torch.arange(min(first, width), device=scores.device)
    firsts = torch.where(place < own.begin[:, None], place, width)
    # Each stratum as a row of its own: the first pages, then its own.
    both = torch.cat((firsts[:, None].expand(-1, count, -1), own.places), dim=2)
    of_heads = both.view(batch, 1, -1).expand(-1, num_q_heads, -1)
    shown = F.pad(scores, (0, 1)).gather(2, of_heads).view(batch, num_q_heads, count, -1)
    shown = shown.transpose(1, 2).flatten(0, 1)
    share = combine_heads(shown, both.flatten(0, 1) < width, num_kv_heads, combine)
    # A damaged index may give anything; no page that does not compete comes before any of it.
    largest = torch.finfo(torch.float32).max
    share = share[..., len(place) :].nan_to_num(nan=-largest, posinf=largest, neginf=-largest)
    share = share.reshape(batch, count, num_kv_heads, most).transpose(1, 2)
    return share.masked_fill((own.places == width)[:, None], -torch.inf)


def _chosen(
    scores: torch.Tensor,
    num_tiles: torch.Tensor,
    kept: torch.Tensor,
    rule: SelectionRule,
    num_kv_heads: int,
    combine: str,
    keep: torch.Tensor | None = None,
) -> torch.Tensor:
    """int64 ``[B, H, W]``: positions of the kept pages in the order of the rule, then ``W``."""
    batch, _, width = scores.shape
    own = rule.strata(num_tiles, kept, width)
    share = stratum_shares(scores, own, rule.first, num_kv_heads, combine)
    if keep is not None:
        marked = F.pad(keep, (0, 1)).gather(1, own.places.flatten(1)).view_as(own.places)
        share = share.masked_fill(marked[:, None], torch.finfo(torch.float32).max)
    order = share.sort(dim=-1, descending=True, stable=True).indices
    ranked = own.places[:, None].expand_as(order).gather(3, order)
    place = torch.arange(max(width, share.shape[3]), device=scores.device)
    best = place[: share.shape[3]] < own.takes[:, None, :, None]
    picked = torch.where(best, ranked, width).flatten(2)
    place = place[:width]
    first = torch.where(place[: rule.first] < own.begin[:, None], place[: rule.first], width)
    newest = own.end[:, None] + place[: rule.recent]
    newest = torch.where(newest < num_tiles[:, None], newest, width)
    ends = (side[:, None].expand(-1, num_kv_heads, -1) for side in (first, newest))
    listed = torch.cat((next(ends), picked, next(ends)), dim=2)
    # Without the gaps.
    used = listed < width
    there = torch.where(used, used.cumsum(dim=2) - 1, width)
    chosen = torch.full((batch, num_kv_heads, width + 1), width, device=scores.device)
    chosen = chosen.scatter_(2, there, listed)[..., :width]
    whole = torch.where(place < num_tiles[:, None], place, width)
    return torch.where((kept < num_tiles)[:, None, None], chosen, whole[:, None])
