"""Compact mode in the engine: when a request's sparse layers drop tokens, when that was wrong."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import numpy as np
import torch

from bicl.cache.groups import GroupedManager
from bicl.frontends.http.engine.config import SparseStats
from bicl.frontends.http.engine.plan import Chunk
from bicl.frontends.http.engine.prompts import PromptReader
from bicl.frontends.http.engine.sequence import LogitsNeed, Sequence
from bicl.frontends.http.engine.sparse import SparseTotals
from bicl.frontends.http.request import GenerationRequest
from bicl.sparse.compact import OBSERVED, CompactBackend, Observed, Verdict, tokens_to_keep
from bicl.sparse.config import HySparseConfig
from bicl.sparse.guard import Signals
from bicl.sparse.row import SparseRow
from bicl.sparse.selection import SelectionRule

__all__ = ["REVIEW_TOKENS", "CompactControl"]

REVIEW_TOKENS = 256
"""Generated tokens after which a request's tokens are judged again."""


@dataclass(frozen=True)
class CompactStep:
    """One step. ``observed``: rows that are judged, by their place in the step."""

    observed: Mapping[int, Observed]
    sparsity: np.ndarray | None = None
    keep: np.ndarray | None = None
    shadow: bool = False


@dataclass(frozen=True)
class _Drop:
    sequence: Sequence
    verdicts: Mapping[int, Verdict]
    observed: Observed


class CompactControl:
    """Decides before a step, learns after it, drops tokens once the step is committed.

    Args:
        config: of the server.
        backend: what the model's attention runs on.
        manager: of both page groups.
        prompts: reads requests.
    """

    def __init__(
        self,
        config: HySparseConfig,
        backend: CompactBackend,
        manager: GroupedManager,
        prompts: PromptReader,
    ) -> None:
        self._config = config
        self._prompts = prompts
        self._backend = backend
        self._manager = manager
        self._totals = SparseTotals()
        self._step = CompactStep({})
        self._drops: list[_Drop] = []
        self._judged_at: dict[str, int] = {}
        # Where each layer holds a request's boundaries since it dropped tokens.
        self._moved: dict[str, Mapping[int, torch.Tensor]] = {}
        self._compactions = 0
        self._dropped_pages = 0

    def begin(self, request: GenerationRequest) -> SparseRow:
        """The state of a new request."""
        return self._prompts.begin(request)

    def plan(self, chunks: SequenceOf[Chunk]) -> CompactStep:
        """Which rows are judged in this step."""
        observed = {}
        begin = 0
        for place, chunk in enumerate(chunks):
            found = self._observe(place, begin, chunk)
            if found is not None:
                observed[place] = found
            begin += chunk.count
        self._backend.observe(list(observed.values()))
        self._step = CompactStep(observed)
        return self._step

    def finish(self, chunks: SequenceOf[Chunk]) -> list[Sequence]:
        """Count what the step did; returns the sequences that go back to the full cache.

        What they computed in this step is not to be used.
        """
        step = self._step
        verdicts = dict(zip(step.observed, self._backend.verdicts(), strict=True))
        self._drops = []
        back = []
        signals = {}
        for place, chunk in enumerate(chunks):
            row = chunk.sequence.sparse
            if row is None or row.ratio == 0.0:
                continue
            if place in step.observed:
                self._judged_at[chunk.sequence.id] = chunk.start + chunk.count
                measured = self._signals(chunk, step.observed[place], verdicts[place])
                signals[place] = measured
                if not row.learn(measured):
                    drop = _Drop(chunk.sequence, verdicts[place], step.observed[place])
                    self._drops.append(drop)
                    continue
                self._totals.fallbacks[row.fallback] += 1
                if _dropped(chunk.sequence):
                    back.append(chunk.sequence)
            elif chunk.count == 1 and chunk.start >= chunk.sequence.num_prompt:
                self._count(chunk, row)
        if signals:
            self._totals.shadow(signals)
        return back

    def settle(self, chunks: SequenceOf[Chunk]) -> None:
        """The step is committed: drop what was judged, and have others judged again.

        To be called under the lock of the bookkeeping.
        """
        for drop in self._drops:
            self._drop(drop)
        self._drops = []
        for chunk in chunks:
            self._review(chunk)

    def forget(self, sequence: Sequence) -> None:
        """It left the engine."""
        self._judged_at.pop(sequence.id, None)
        self._moved.pop(sequence.id, None)

    def stats(self) -> SparseStats:
        gauges = self._manager.group.gauges()
        return replace(
            self._totals.stats(self._config.sparsity_ratio),
            compactions=self._compactions,
            dropped_pages=self._dropped_pages,
            compact_pages={
                "free": gauges.free_pages,
                "cached": gauges.cached_pages,
                "in_use": gauges.in_use_pages,
            },
        )

    # --- inside ------------------------------------------------------------------------------
    def _observe(self, place: int, begin: int, chunk: Chunk) -> Observed | None:
        sequence, end = chunk.sequence, chunk.start + chunk.count
        row = sequence.sparse
        if row is None or row.ratio == 0.0 or chunk.logits is not LogitsNeed.LAST:
            return None
        if chunk.count < OBSERVED or end != len(sequence.ids):
            return None
        held, rule = end - _dropped(sequence), self._rule_of(row)
        kept = tokens_to_keep(end, row.ratio, rule)
        if not _spares_pages(held, kept, rule.page_size):
            return None
        forced = self._forced(sequence, row, kept)
        return Observed(place, begin, begin + chunk.count, held, kept, rule, forced)

    def _rule_of(self, row: SparseRow) -> SelectionRule:
        return self._backend.rule.with_windows(row.windows)

    def _forced(
        self, sequence: Sequence, row: SparseRow, kept: int
    ) -> Mapping[int, torch.Tensor] | None:
        """Where each layer has the boundaries: at most half of what it may choose."""
        if not row.boundaries:
            return None
        if _dropped(sequence):
            return self._moved.get(sequence.id)
        rule = self._rule_of(row)
        free = (kept - (rule.first + rule.recent) * rule.page_size) // 2
        chosen = row.boundaries[: max(0, free)]
        return self._backend.everywhere(chosen) if chosen else None

    def _signals(
        self, chunk: Chunk, observed: Observed, verdicts: Mapping[int, Verdict]
    ) -> Signals:
        mass = torch.stack([each.mass_kept for each in verdicts.values()]).mean()
        entropy = torch.stack([each.entropy for each in verdicts.values()]).mean()
        share = 1.0 - observed.num_kept / (chunk.start + chunk.count)
        measured = float(entropy)
        return Signals(share, share, float(mass), measured, entropy_by_group={"sparse": measured})

    def _count(self, chunk: Chunk, row: SparseRow) -> None:
        size, layers = self._backend.rule.page_size, len(self._backend.layers)
        length, dropped = chunk.start + 1, _dropped(chunk.sequence)
        total = -(-length // size) * layers
        read = -(-(length - dropped) // size) * layers
        self._totals.rows["sparse" if dropped else "short"] += 1
        if dropped:
            row.count(chunk.start, read, total)
            self._totals.tiles_read += read
            self._totals.tiles_skipped += total - read

    def _drop(self, drop: _Drop) -> None:
        pages = drop.sequence.pages
        if pages is None or pages.group is None:
            return
        kept = self._manager.begin_drop(drop.observed.num_kept)
        if kept is None:  # no room to lay them out now; the next review tries again
            return
        self._backend.drop(pages.group.pages.page_ids, drop.verdicts, kept.page_ids)
        lost = drop.observed.num_tokens - drop.observed.num_kept
        self._dropped_pages += self._manager.finish_drop(pages, kept, lost)
        self._compactions += 1
        if drop.observed.forced is not None:
            moved = self._backend.moved(drop.observed.forced, drop.verdicts)
            self._moved[drop.sequence.id] = moved
        assert drop.sequence.sparse is not None
        drop.sequence.sparse.approximate_from(drop.sequence.num_computed)

    def _review(self, chunk: Chunk) -> None:
        """Compute the newest tokens once more, as a chunk whose queries judge the others."""
        sequence, end = chunk.sequence, chunk.start + chunk.count
        row = sequence.sparse
        if row is None or row.ratio == 0.0 or end != len(sequence.ids) or sequence.pages is None:
            return
        judged = self._judged_at.setdefault(sequence.id, sequence.num_prompt)
        # The last chunk of a prompt can be too short to judge.
        short = end == sequence.num_prompt and chunk.count < OBSERVED <= end
        if end - judged < REVIEW_TOKENS and not short:
            return
        self._judged_at[sequence.id] = end
        rule = self._rule_of(row)
        kept = tokens_to_keep(end + 1, row.ratio, rule)
        spares = _spares_pages(end + 1 - _dropped(sequence), kept, rule.page_size)
        if spares and self._manager.extend(sequence.pages, end + 1):
            sequence.num_computed = end + 1 - OBSERVED


def _spares_pages(held: int, kept: int, page_size: int) -> bool:
    return -(-kept // page_size) < -(-held // page_size)


def _dropped(sequence: Sequence) -> int:
    """Tokens that its sparse layers no longer hold."""
    if sequence.pages is None or sequence.pages.group is None:
        return 0
    return sequence.pages.group.num_dropped_tokens
