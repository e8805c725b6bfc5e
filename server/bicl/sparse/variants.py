"""Every way of choosing keys behind one interface: ours, the literal form, and the baselines.

Serving uses ``centroids``, ``bounds`` or ``gate`` through :mod:`bicl.sparse.backend`. Here all of
them run in plain torch on any device, many decode rows at a time, so that they can be compared on
equal terms: in each row each variant keeps as many keys as the tile rule allows, its first and
recent windows among them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from bicl.ops.cpu.sparse import (
    centroid_rows,
    cluster_means,
    combine_heads,
    quantise_rows,
    quantise_spreads,
    select_tiles,
    stored_rows,
    turned,
)
from bicl.sparse.selection import SelectionRule
from bicl.sparse.sgm import PAGE_GATES, BoundGate, CentroidGate, SpatialGate

E4M3_MAX = 448.0

__all__ = ["VARIANTS", "Choice", "DecodeRows", "kept_keys", "largest"]


@dataclass(frozen=True)
class DecodeRows:
    """Decode rows of one layer over keys that they share.

    A row is one query at the end of ``length`` tokens. It sees the first ``shared`` of ``key`` and,
    always, the rest, its own sequence's newest tokens, which lie in recent windows.

    Attributes:
        query: ``[R, Hq, D]``.
        key: ``[T, H, D]``.
        shared, length: int32 ``[R]``.
        scale: of the attention scores.
        before: as ``query``, of each row's step before; for the variants that choose by it.
    """

    query: torch.Tensor
    key: torch.Tensor
    shared: torch.Tensor
    length: torch.Tensor
    scale: float
    before: torch.Tensor | None = None

    @property
    def num_kv_heads(self) -> int:
        return self.key.shape[1]

    def a_step_earlier(self) -> DecodeRows:
        """The same rows as their queries of the step before see them."""
        if self.before is None:
            raise ValueError("the queries of the step before are not known")
        return replace(self, query=self.before)


@dataclass(frozen=True)
class Choice:
    """How to choose.

    Attributes:
        rule: numbers of tiles.
        sparsity: float32 ``[R]``.
        weights: of the layer's page gates, float32 ``[sets, D]``, by kind.
        gate: for the variants that score by the literal gate.
        combine: of query heads, for the tile variants.
        dtype: of the model, which boxes are kept in.
        seed: of ``random``.
    """

    rule: SelectionRule
    sparsity: torch.Tensor
    weights: Mapping[str, torch.Tensor]
    gate: SpatialGate
    combine: str = "softmax"
    dtype: torch.dtype = torch.float32
    seed: int = 0


def kept_keys(variant: str, rows: DecodeRows, choice: Choice) -> torch.Tensor:
    """bool ``[R, H, T]``: which of the shared keys each row reads."""
    kept = VARIANTS[variant](rows, choice)
    seen = torch.arange(rows.key.shape[0], device=rows.key.device) < rows.shared[:, None]
    return kept & seen[:, None]


# --- tiles ------------------------------------------------------------------------------------
def _centroids(rows: DecodeRows, choice: Choice) -> torch.Tensor:
    return _by_tiles(rows, choice, _centroid_scores(rows, choice), choice.combine)


def _centroid_scores(rows: DecodeRows, choice: Choice) -> torch.Tensor:
    described = _described(rows, choice, CentroidGate.describe)
    return _page_scores(rows, choice, "centroids", described)


def _centroids_ahead(rows: DecodeRows, choice: Choice) -> torch.Tensor:
    """What could be chosen while the step before still runs."""
    return _centroids(rows.a_step_earlier(), choice)


def _centroids_both(rows: DecodeRows, choice: Choice) -> torch.Tensor:
    """By the queries of two steps, as if the group had twice the heads."""
    queries = (rows.query, rows.a_step_earlier().query)
    groups = torch.cat([_grouped(query, rows.num_kv_heads) for query in queries], dim=2)
    return _centroids(replace(rows, query=groups.flatten(1, 2)), choice)


def _centroids_half(rows: DecodeRows, choice: Choice) -> torch.Tensor:
    """Half of the pages ahead, which could be read while the others are chosen."""
    rule = replace(choice.rule, floor=choice.rule.floor // 2)
    half = replace(choice, rule=rule, sparsity=(1 + choice.sparsity) / 2)
    early = rows.a_step_earlier()
    ahead = _tiles(early, half, _centroid_scores(early, half), half.combine)
    both = _tiles(rows, choice, _centroid_scores(rows, choice), choice.combine, ahead)
    return _keys_of(both, rows, choice)


def _centroids_of(
    tokens: int, describe: Callable[[torch.Tensor, int], torch.Tensor]
) -> Callable[[DecodeRows, Choice], torch.Tensor]:
    """A centroid for so many of a page's tokens, held in some way."""

    def of(pages: torch.Tensor) -> torch.Tensor:
        return describe(pages, pages.shape[2] // tokens)

    def kept(rows: DecodeRows, choice: Choice) -> torch.Tensor:
        described = _described(rows, choice, of)
        scores = _page_scores(rows, choice, "centroids", described)
        return _by_tiles(rows, choice, scores, choice.combine)

    return kept


def _rows_of_e4m3(keys: torch.Tensor, count: int) -> torch.Tensor:
    rows = cluster_means(keys, count)
    means = rows[..., :-2].clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()
    spreads = quantise_spreads(rows[..., -1:]).float()
    return torch.cat((turned(means), rows[..., -2:-1], spreads), dim=-1)


def _rows_without_spread(keys: torch.Tensor, count: int) -> torch.Tensor:
    """As if all keys of a cluster were its centroid."""
    rows = centroid_rows(keys, count)
    rows[..., -1] = 0.0
    return rows


def _rows_unturned(keys: torch.Tensor, count: int) -> torch.Tensor:
    """Rounded as they are: a dim that lies far out makes the steps of all others wide."""
    rows = cluster_means(keys, count)
    stored = stored_rows(
        *quantise_rows(rows[..., :-2]), rows[..., -2], quantise_spreads(rows[..., -1])
    )
    return torch.cat((turned(stored[..., :-2]), stored[..., -2:]), dim=-1)


def _bounds(rows: DecodeRows, choice: Choice) -> torch.Tensor:
    return _by_tiles(rows, choice, _box_scores(rows, choice), choice.combine)


def _bounds_16(rows: DecodeRows, choice: Choice) -> torch.Tensor:
    """Four boxes of 16 keys a page of 64, four times the index: what a finer box would give."""
    scores = _box_scores(rows, choice, keys=16)
    parts = choice.rule.page_size // 16
    scores = F.pad(scores, (0, -scores.shape[2] % parts), value=-torch.inf)
    pages = scores.reshape(*scores.shape[:2], -1, parts).logsumexp(dim=-1)
    return _by_tiles(rows, choice, pages, choice.combine)


def _quest(rows: DecodeRows, choice: Choice) -> torch.Tensor:
    """Boxes as upper bounds; the paper has no shared KV heads, the maximum is its natural turn."""
    upper = replace(choice, weights={"bounds": torch.ones_like(choice.weights["bounds"])})
    return _by_tiles(rows, choice, _box_scores(rows, upper), "max")


def _gate(rows: DecodeRows, choice: Choice) -> torch.Tensor:
    keys = _by_page(choice.gate.project(rows.key, "key"), choice.rule.page_size).mean(dim=2)
    query = _grouped(choice.gate.project(rows.query, "query"), rows.num_kv_heads)
    scores = torch.einsum("rhgd,whd->rhgw", query, keys).flatten(1, 2) * choice.gate.sharpness
    return _by_tiles(rows, choice, scores, choice.combine)


def _oracle(rows: DecodeRows, choice: Choice) -> torch.Tensor:
    """Tiles by the attention that they really draw."""
    tokens = _true_scores(rows)
    pages = F.pad(tokens, (0, -tokens.shape[2] % choice.rule.page_size), value=-torch.inf)
    mass = pages.reshape(*pages.shape[:2], -1, choice.rule.page_size).logsumexp(dim=-1)
    return _by_tiles(rows, choice, mass, "softmax")


def _sink_recent(rows: DecodeRows, choice: Choice) -> torch.Tensor:
    """The first window and the newest ones (StreamingLLM's window, at our budget)."""
    width = -(-rows.key.shape[0] // choice.rule.page_size)
    place = torch.arange(width, dtype=torch.float32, device=rows.key.device)
    return _by_tiles(rows, choice, place.expand(*rows.query.shape[:2], -1), "max")


def _random(rows: DecodeRows, choice: Choice) -> torch.Tensor:
    width = -(-rows.key.shape[0] // choice.rule.page_size)
    device = rows.key.device
    generator = torch.Generator(device).manual_seed(choice.seed)
    scores = torch.rand(*rows.query.shape[:2], width, generator=generator, device=device)
    return _by_tiles(rows, choice, scores, "sum")


# --- tokens -----------------------------------------------------------------------------------
def _literal(rows: DecodeRows, choice: Choice) -> torch.Tensor:
    """As the source has it: cosines, softmax inside each window of 64, top-K over all of them."""
    cosine = _cosines(rows, choice)
    size = choice.rule.page_size
    share = F.pad(cosine, (0, -cosine.shape[2] % size), value=-torch.inf)
    share = share.reshape(*share.shape[:2], -1, size).softmax(dim=-1).flatten(2)
    return _by_tokens(rows, choice, share[..., : cosine.shape[2]], "sum")


def _raw_global(rows: DecodeRows, choice: Choice) -> torch.Tensor:
    """The same cosines, compared as they are."""
    return _by_tokens(rows, choice, _cosines(rows, choice), "max")


def _tile_token(rows: DecodeRows, choice: Choice) -> torch.Tensor:
    """Half of the sparsity by tiles, the rest by the gate's scores of the tokens in them."""
    tiles = _centroids(rows, replace(choice, sparsity=choice.sparsity / 2))
    cosine = _cosines(rows, choice) * choice.gate.sharpness
    return _by_tokens(rows, choice, cosine, choice.combine, among=tiles)


def _oracle_token(rows: DecodeRows, choice: Choice) -> torch.Tensor:
    """Tokens by the attention that they really draw: no choice of as many keys does better."""
    return _by_tokens(rows, choice, _true_scores(rows), "softmax")


VARIANTS: dict[str, Callable[[DecodeRows, Choice], torch.Tensor]] = {
    "centroids": _centroids,
    "centroids-ahead": _centroids_ahead,
    "centroids-both": _centroids_both,
    "centroids-half": _centroids_half,
    "centroids-flat": _centroids_of(8, _rows_without_spread),
    "centroids-unturned": _centroids_of(8, _rows_unturned),
    "centroids-2": _centroids_of(32, _rows_of_e4m3),
    "centroids-4": _centroids_of(16, _rows_of_e4m3),
    "centroids-8": _centroids_of(8, _rows_of_e4m3),
    "centroids-16": _centroids_of(4, centroid_rows),
    "bounds": _bounds,
    "bounds-16": _bounds_16,
    "gate": _gate,
    "literal": _literal,
    "tile-token": _tile_token,
    "raw-global": _raw_global,
    "quest": _quest,
    "sink-recent": _sink_recent,
    "random": _random,
    "oracle": _oracle,
    "oracle-token": _oracle_token,
}


# --- shared -----------------------------------------------------------------------------------
def _grouped(query: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """``[R, Hq, D]`` to ``[R, H, group, D]``."""
    return query.reshape(len(query), num_kv_heads, -1, query.shape[2])


def _by_page(keys: torch.Tensor, size: int) -> torch.Tensor:
    """``[T, H, D]`` to ``[pages, H, size, D]``; the last page repeats its last key."""
    missing = -len(keys) % size
    padded = torch.cat((keys, keys[-1:].expand(missing, -1, -1)))
    return padded.view(-1, size, *keys.shape[1:]).transpose(1, 2)


def _true_scores(rows: DecodeRows) -> torch.Tensor:
    """float32 ``[R, Hq, T]``, -inf where a row sees nothing."""
    query = _grouped(rows.query.float(), rows.num_kv_heads)
    scores = torch.einsum("rhgd,thd->rhgt", query, rows.key.float()).flatten(1, 2) * rows.scale
    hidden = torch.arange(len(rows.key), device=scores.device) >= rows.shared[:, None]
    return scores.masked_fill_(hidden[:, None], -torch.inf)


def _cosines(rows: DecodeRows, choice: Choice) -> torch.Tensor:
    """float32 ``[R, Hq, T]``."""
    query = _grouped(choice.gate.project(rows.query, "query"), rows.num_kv_heads)
    return torch.einsum("rhgd,thd->rhgt", query, choice.gate.project(rows.key, "key")).flatten(1, 2)


def _box_scores(rows: DecodeRows, choice: Choice, keys: int | None = None) -> torch.Tensor:
    """Scores of boxes of ``keys`` keys each; of whole pages by default."""
    boxes = BoundGate.describe(_by_page(rows.key, keys or choice.rule.page_size)).to(choice.dtype)
    return _page_scores(rows, choice, "bounds", boxes)


_DESCRIBED: Any = WeakTensorKeyDictionary()


def _described(
    rows: DecodeRows, choice: Choice, describe: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Index rows of all pages; computed once for the same keys, however many rows see them."""
    own = _DESCRIBED.setdefault(rows.key, {})
    name = (describe, choice.rule.page_size)
    if name not in own:
        own[name] = describe(_by_page(rows.key, choice.rule.page_size))
    described: torch.Tensor = own[name]
    return described


def _page_scores(rows: DecodeRows, choice: Choice, kind: str, pages: torch.Tensor) -> torch.Tensor:
    """float32 ``[R, Hq, W]`` by index rows ``[W, H, rows, dims]``."""
    # All rows share the keys: one batch entry with all the rows as its heads.
    count, heads = rows.query.shape[0], rows.num_kv_heads
    query = _grouped(rows.query, heads).transpose(0, 1).reshape(1, -1, rows.query.shape[2])
    stored = pages.transpose(0, 1)[None]
    scores = PAGE_GATES[kind].score(query, stored, choice.weights[kind], rows.scale)
    return scores.view(heads, count, -1, len(pages)).transpose(0, 1).flatten(1, 2)


def _by_tiles(rows: DecodeRows, choice: Choice, scores: torch.Tensor, combine: str) -> torch.Tensor:
    """Keys of the tiles that ``select_tiles`` picks by ``scores`` ``[R, Hq, tiles]``."""
    return _keys_of(_tiles(rows, choice, scores, combine), rows, choice)


def _keys_of(tiles: torch.Tensor, rows: DecodeRows, choice: Choice) -> torch.Tensor:
    return tiles.repeat_interleave(choice.rule.page_size, dim=2)[..., : len(rows.key)]


def _tiles(
    rows: DecodeRows,
    choice: Choice,
    scores: torch.Tensor,
    combine: str,
    keep: torch.Tensor | None = None,
) -> torch.Tensor:
    """Those tiles, ``keep`` among them: bool ``[R, H, W]``, W of the longest row."""
    rule, heads = choice.rule, rows.num_kv_heads
    num_tiles = (rows.length + rule.page_size - 1) // rule.page_size
    width = max(int(num_tiles.max()), scores.shape[2])
    scores = F.pad(scores, (0, width - scores.shape[2]))
    table = torch.arange(width, dtype=torch.int32, device=scores.device).expand(len(scores), -1)
    positions = torch.empty(len(scores), heads, width, dtype=torch.int32, device=scores.device)
    select_tiles(scores, table, rows.length, choice.sparsity, rule, heads, combine, positions, keep)
    kept = torch.zeros(len(scores), heads, width + 1, dtype=torch.bool, device=scores.device)
    kept.scatter_(2, positions.long(), True)
    return kept[..., :width]


def _by_tokens(
    rows: DecodeRows,
    choice: Choice,
    scores: torch.Tensor,
    combine: str,
    among: torch.Tensor | None = None,
) -> torch.Tensor:
    """The best tokens by ``scores`` ``[R, Hq, T]``, as many as the tile rule would keep.

    Args:
        among: bool ``[R, H, T]``, what to choose from.
    """
    rule, heads, total = choice.rule, rows.num_kv_heads, len(rows.key)
    place = torch.arange(total, device=scores.device)
    num_tiles = (rows.length + rule.page_size - 1) // rule.page_size
    first = place < rule.first * rule.page_size
    recent = place >= ((num_tiles - rule.recent) * rule.page_size)[:, None]
    seen = place < rows.shared[:, None]
    candidate = seen & ~first & ~recent
    share = combine_heads(scores, seen & ~recent, heads, combine)
    share = share.masked_fill((first | recent)[:, None], torch.inf)
    if among is not None:
        share = share.masked_fill(~among & candidate[:, None], -torch.finfo(share.dtype).max)
    share = share.masked_fill(~seen[:, None], -torch.inf)
    skipped = (num_tiles - rule.tiles_to_keep(num_tiles, choice.sparsity)) * rule.page_size
    return largest(share, (rows.shared - skipped).clamp_min(0)[:, None, None])


def largest(values: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """bool ``[R, H, T]``: the ``count`` ``[R, 1, 1]`` largest of each row of float32 ``values``;
    of equal ones the earlier. The bits of the last of them are found one by one, which on a GPU
    takes a fraction of a sort."""
    bits = values.view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    last = torch.full((*values.shape[:2], 1), -(1 << 31), dtype=torch.int32, device=values.device)
    for bit in reversed(range(32)):
        higher = last + (1 << bit) if bit < 31 else torch.zeros_like(last)
        enough = (ordered >= higher).sum(dim=-1, keepdim=True) >= count
        last = torch.where(enough, higher, last)
    above, equal = ordered > last, ordered == last
    room = count - above.sum(dim=-1, keepdim=True)
    return above | (equal & (equal.cumsum(dim=-1) <= room))
