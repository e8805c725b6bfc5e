"""Compact mode: when a prompt is computed, sparse layers keep the tokens that its end looks at.

The kept tokens of each KV head are laid side by side into fresh pages, so that what remains is
dense storage: whole tiles of a power of two and at least 4,096 bytes, at addresses that are
multiples of 256 bytes, which a page's tiles are anyway. Positions do not change: rotary embedding
was applied before a key was stored. Attention over what remains is plain attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch.nn import functional as F

from bicl.attention.backend import AttentionBackend
from bicl.attention.metadata import AttentionMetadata
from bicl.attention.pool import LayerCache
from bicl.attention.rotary import Rotary
from bicl.errors import BackendError
from bicl.sparse.selection import SelectionRule

__all__ = [
    "OBSERVED",
    "CompactBackend",
    "Observed",
    "Verdict",
    "choose_tokens",
    "token_scores",
    "tokens_to_keep",
]

OBSERVED = 32
"""Newest queries that vote on which tokens stay (SnapKV's observation window)."""
SMOOTHING = 65
"""Tokens over which votes are averaged, so that passages stay whole; widths: docs/hysparse.md."""
SCORES_BYTES = 1 << 28
"""Bound of the score matrix that is held at once."""


@dataclass(frozen=True)
class Observed:
    """A row whose tokens are to be judged in the next step.

    Attributes:
        row: in the step's metadata.
        begin, end: its query rows.
        num_tokens: that it holds in the compact group after this step.
        num_kept: that it is to keep.
        rule: which of them always.
        forced: int64 ``[H, F]`` a layer, places of tokens that stay whatever the votes.
    """

    row: int
    begin: int
    end: int
    num_tokens: int
    num_kept: int
    rule: SelectionRule
    forced: Mapping[int, torch.Tensor] | None = None


@dataclass(frozen=True)
class Verdict:
    """One row in one layer.

    Attributes:
        positions: int32 ``[H, num_kept]``, places of the kept tokens, ascending.
        mass_kept: share of the observed queries' attention that lies there, a scalar.
        entropy: order-2 entropy of that attention in nats, mean of queries and heads, a scalar.
    """

    positions: torch.Tensor
    mass_kept: torch.Tensor
    entropy: torch.Tensor


def tokens_to_keep(num_tokens: int, ratio: float, rule: SelectionRule) -> int:
    """Tokens of a sequence that a compact layer keeps: as many pages as select mode would read,
    the last one as full as it is."""
    pages = -(-num_tokens // rule.page_size)
    kept = int(rule.tiles_to_keep(torch.tensor([pages]), torch.tensor([ratio]))[0])
    always = rule.first * rule.page_size + _recent_tokens(num_tokens, rule)
    return min(num_tokens, max(always, num_tokens - (pages - kept) * rule.page_size))


def _recent_tokens(num_tokens: int, rule: SelectionRule) -> int:
    """Newest tokens that always stay: the recent windows, and the observed queries' own, which a
    later step computes again in their places."""
    last_page = (num_tokens - 1) % rule.page_size + 1
    return max(OBSERVED, (rule.recent - 1) * rule.page_size + last_page)


def token_scores(
    query: torch.Tensor, key: torch.Tensor, *, scale: float, softcap: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """How much attention the newest queries pay to each token.

    Args:
        query: ``[w, Hq, D]``, of the last ``w`` tokens.
        key: ``[n, H, D]``, of all of them.
        scale, softcap: of the attention.

    Returns:
        float32 ``[H, n]``, summing to the query heads of a group, and the mean entropy.
    """
    num_queries, num_q_heads, _ = query.shape
    num_tokens, num_heads, _ = key.shape
    group = num_q_heads // num_heads
    place = torch.arange(num_tokens, device=key.device)
    last = num_tokens - num_queries + torch.arange(num_queries, device=key.device)
    scores, entropies = [], []
    step = max(1, SCORES_BYTES // (num_queries * group * num_tokens * 4))
    for head in range(0, num_heads, step):
        keys = key[:, head : head + step].float()
        queries = query[:, head * group : (head + step) * group].float()
        queries = queries.reshape(num_queries, keys.shape[1], group, -1)
        logits = torch.einsum("qhgd,nhd->hgqn", queries, keys) * scale
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        share = logits.masked_fill(place > last[:, None], -torch.inf).softmax(dim=-1)
        scores.append(share.mean(dim=2).sum(dim=1))
        entropies.append(-share.square().sum(dim=-1).log().flatten())
    return torch.cat(scores), torch.cat(entropies).mean()


def choose_tokens(
    scores: torch.Tensor,
    num_kept: int,
    rule: SelectionRule,
    forced: torch.Tensor | None = None,
) -> torch.Tensor:
    """The first and recent windows and the best-scored of the rest, int32 ``[H, num_kept]``.

    Args:
        scores: float32 ``[H, n]``.
        num_kept: at least the tokens of those windows, and the forced ones.
        forced: int64 ``[H, F]``, further tokens that stay.
    """
    num_tokens = scores.shape[1]
    smooth = F.avg_pool1d(
        scores[None], SMOOTHING, stride=1, padding=SMOOTHING // 2, count_include_pad=False
    )[0]
    smooth[:, : rule.first * rule.page_size] = torch.inf
    smooth[:, num_tokens - _recent_tokens(num_tokens, rule) :] = torch.inf
    if forced is not None:
        smooth.scatter_(1, forced, torch.inf)
    return smooth.topk(num_kept, dim=1).indices.sort(dim=1).values.int()


class CompactBackend:
    """``AttentionBackend`` of a model with two page groups.

    Layers of the compact group use ``meta.compact``, which every step must have.

    Args:
        full: for the layers that keep every token.
        compact: a backend of its own for the others, because backends remember their step.
        layers: pages of the compact group, by layer number.
        rule: which tokens of any row are always kept.
    """

    def __init__(
        self,
        full: AttentionBackend,
        compact: AttentionBackend,
        layers: Mapping[int, LayerCache],
        rule: SelectionRule,
    ) -> None:
        self.name = full.name
        self.full = full
        self.compact = compact
        self.layers = dict(layers)
        self.rule = rule
        self._operator: Any = import_module(f"bicl.ops.{full.name}.compact_tokens").compact_tokens
        self._numbers = {layer.pages.data_ptr(): number for number, layer in layers.items()}
        self._planned: AttentionMetadata | None = None
        self._observed: Sequence[Observed] = ()
        self._verdicts: list[dict[int, Verdict]] = []

    def observe(self, rows: Sequence[Observed]) -> None:
        """Judge these rows' tokens in the next step, which must not come from a CUDA graph."""
        self._observed = rows
        self._verdicts = [{} for _ in rows]

    def verdicts(self) -> list[dict[int, Verdict]]:
        """Of each observed row, by layer number."""
        found, self._observed, self._verdicts = self._verdicts, (), []
        return found

    def drop(
        self, pages: Sequence[int], verdicts: Mapping[int, Verdict], target: Sequence[int]
    ) -> None:
        """Lay the kept tokens of one sequence into other pages, in every compact layer.

        Args:
            pages: the sequence's, in the compact group.
            verdicts: which tokens each layer keeps.
            target: where they go.
        """
        device = next(iter(self.layers.values())).device
        table, fresh = (torch.tensor(p, dtype=torch.int32, device=device) for p in (pages, target))
        for number, layer in self.layers.items():
            self._operator(layer, table, verdicts[number].positions, layer, fresh)

    def everywhere(self, tokens: Sequence[int]) -> dict[int, torch.Tensor]:
        """The same tokens for every head of every compact layer, while none was dropped."""
        return {
            number: torch.tensor(tokens, device=layer.device).expand(layer.layout.num_kv_heads, -1)
            for number, layer in self.layers.items()
        }

    def moved(
        self, forced: Mapping[int, torch.Tensor], verdicts: Mapping[int, Verdict]
    ) -> dict[int, torch.Tensor]:
        """Where forced tokens lie once the kept ones are laid side by side."""
        return {
            number: torch.searchsorted(verdicts[number].positions.long(), places.contiguous())
            for number, places in forced.items()
        }

    # --- AttentionBackend --------------------------------------------------------------------
    def plan(self, meta: AttentionMetadata) -> None:
        if meta.compact is None:
            raise BackendError("a model with two page groups needs AttentionMetadata.compact")
        self._planned = meta
        self.full.plan(meta)
        self.compact.plan(meta.compact)

    def store(
        self,
        layer: LayerCache,
        key: torch.Tensor,
        value: torch.Tensor,
        slots: torch.Tensor,
        *,
        rotary: Rotary | None = None,
    ) -> None:
        """``slots`` of the planned step's ``slot_mapping`` mean the same tokens in either group."""
        if layer.pages.data_ptr() not in self._numbers:
            self.full.store(layer, key, value, slots, rotary=rotary)
            return
        planned = self._planned
        if planned is not None and planned.compact is not None and slots is planned.slot_mapping:
            slots = planned.compact.slot_mapping
        self.compact.store(layer, key, value, slots, rotary=rotary)

    def run(
        self,
        query: torch.Tensor,
        layer: LayerCache,
        meta: AttentionMetadata,
        *,
        scale: float,
        window_left: int = -1,
        window_right: int = -1,
        softcap: float = 0.0,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        number = self._numbers.get(layer.pages.data_ptr())
        backend = self.full if number is None else self.compact
        if number is not None:
            if meta.compact is None:
                raise BackendError("a model with two page groups needs AttentionMetadata.compact")
            meta = meta.compact
            for place, row in enumerate(self._observed):
                self._verdicts[place][number] = self._judge(
                    number, query, layer, meta, row, scale, softcap
                )
        return backend.run(
            query,
            layer,
            meta,
            scale=scale,
            window_left=window_left,
            window_right=window_right,
            softcap=softcap,
            out=out,
            return_lse=return_lse,
        )

    def gather(
        self, layer: LayerCache, page_table: torch.Tensor, cache_seqlens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.full.gather(layer, page_table, cache_seqlens)

    def copy_pages(
        self, layers: list[LayerCache], source: torch.Tensor, target: torch.Tensor
    ) -> None:
        """Copy pages of the first group; the second one shares whole pages only."""
        kept = [layer for layer in layers if layer.pages.data_ptr() not in self._numbers]
        self.full.copy_pages(kept, source, target)

    def _judge(
        self,
        number: int,
        query: torch.Tensor,
        layer: LayerCache,
        meta: AttentionMetadata,
        row: Observed,
        scale: float,
        softcap: float,
    ) -> Verdict:
        table = meta.page_table[row.row : row.row + 1]
        length = torch.tensor([row.num_tokens], dtype=torch.int32, device=query.device)
        key, _ = self.compact.gather(layer, table, length)
        newest = query[max(row.begin, row.end - OBSERVED) : row.end]
        scores, entropy = token_scores(newest, key, scale=scale, softcap=softcap)
        forced = None if row.forced is None else row.forced[number]
        positions = choose_tokens(scores, row.num_kept, row.rule, forced)
        kept = scores.gather(1, positions.long()).sum() / scores.sum()
        return Verdict(positions, kept, entropy)
