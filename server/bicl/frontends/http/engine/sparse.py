"""HySparse in the engine: which rows of a step are sparse, what that saved, who goes back."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
import torch

from bicl.frontends.http.engine.config import SparseStats
from bicl.frontends.http.engine.plan import Chunk
from bicl.frontends.http.engine.prompts import PromptReader
from bicl.frontends.http.engine.sequence import Sequence
from bicl.frontends.http.request import GenerationRequest
from bicl.sparse.config import HySparseConfig
from bicl.sparse.guard import GuardBounds, Signals
from bicl.sparse.row import SparseRow
from bicl.sparse.selection import SelectionRule, tiles_by_layer
from bicl.sparse.shadow import ShadowBackend

__all__ = ["SparseControl", "SparseStep", "SparseTotals"]

SMOOTHING = 0.1
"""Weight of the newest shadow step in the entropy gauges."""


@dataclass(frozen=True)
class SparseStep:
    """One decode step in which some row leaves tiles out.

    Attributes:
        sparsity: float32 ``[B]``, for the device.
        keep: bool ``[B, pages]``, pages that are always read; ``None``: no row has such.
        tiles: int ``[B]``, of a KV head in a sparse layer.
        kept: int ``[layers, B]``, those read.
        shadow: some layers also run dense.
    """

    sparsity: np.ndarray
    tiles: np.ndarray
    kept: np.ndarray
    shadow: bool
    keep: np.ndarray | None = None

    @property
    def skips(self) -> np.ndarray:
        return np.asarray((self.kept < self.tiles).any(axis=0))


class SparseControl:
    """Decides before a step and learns after it. :meth:`begin` may be called from any thread, all
    else by the engine's alone.

    Args:
        config: of the server.
        bounds: of the live signals.
        layers: numbers of the sparse layers.
        depth: layers of the model.
        page_size: tokens a page.
        prompts: reads requests.
        backend: what the model's attention runs on.
        least_skipped: tiles that the rows of a step together leave out of a layer; a step that
            would leave out fewer runs dense.
    """

    def __init__(
        self,
        config: HySparseConfig,
        bounds: GuardBounds,
        *,
        layers: tuple[int, ...],
        depth: int,
        page_size: int,
        prompts: PromptReader,
        backend: ShadowBackend,
        least_skipped: int,
    ) -> None:
        self._config = config
        self._bounds = bounds
        self._prompts = prompts
        self._layers = layers
        self._page_size = page_size
        self._backend = backend
        self._least_skipped = least_skipped
        self._rule = SelectionRule.of(config, page_size)
        indexes = backend.sparse.indexes
        self._shares = torch.tensor([indexes[layer].share for layer in layers])
        self._groups = _layer_groups(layers, depth)
        self._random = random.Random(0)
        self._turn = 0
        self._totals = SparseTotals()
        self._step: SparseStep | None = None

    def begin(self, request: GenerationRequest) -> SparseRow:
        """The state of a new request."""
        return self._prompts.begin(request)

    def plan(self, chunks: SequenceOf[Chunk]) -> SparseStep | None:
        """Rows of the step and their sparsity; ``None``: all of them run dense, since no row can
        leave anything out, or all together too little to pay for the choice.

        Prompt tokens are always computed dense, so that a prefix is worth the same however it
        came about.
        """
        self._step = self._plan(chunks)
        return self._step

    def _plan(self, chunks: SequenceOf[Chunk]) -> SparseStep | None:
        self._backend.disarm()  # a step that failed left it armed
        rows = [chunk.sequence.sparse if _is_decode(chunk) else None for chunk in chunks]
        sparsity = np.array([row.ratio if row else 0.0 for row in rows], dtype=np.float32)
        lengths = np.array([chunk.start + chunk.count for chunk in chunks], dtype=np.int32)
        tiles = -(-lengths // self._page_size)
        rows_of = (torch.from_numpy(tiles), torch.from_numpy(sparsity))
        kept = tiles_by_layer(*rows_of, self._rule, self._shares)
        step = SparseStep(sparsity, tiles, kept.numpy(), shadow=False)
        pays = int((step.tiles - step.kept).sum()) >= self._least_skipped * len(self._layers)
        for row, skips in zip(rows, step.skips, strict=True):
            if row:
                path = row.path
                if path == "sparse" and not (skips and pays):
                    path = "little" if skips else "short"
                self._totals.rows[path] += 1
        if not pays:
            return None
        due = any(
            row.is_due(self._bounds.shadow_interval)
            for row, skips in zip(rows, step.skips, strict=True)
            if row and skips
        )
        if due:
            self._backend.arm({*self._groups.values(), self._layers[self._turn]})
        keep = self._always_read(rows, step)
        return SparseStep(sparsity, tiles, step.kept, shadow=due, keep=keep)

    def _always_read(
        self, rows: SequenceOf[SparseRow | None], step: SparseStep
    ) -> np.ndarray | None:
        """Pages that a row always reads beside those that all do: of its newest windows as far as
        they fit, and of boundaries, in half of what it may choose then."""
        if not any(row and (row.windows or row.boundaries) for row in rows):
            return None
        rule = self._rule
        keep = np.zeros((len(rows), int(step.tiles.max())), dtype=bool)
        for place, row in enumerate(rows):
            if row is None or not step.skips[place]:
                continue
            free = max(0, int(step.kept[:, place].min()) - rule.first - rule.recent)
            newest = min(free, rule.with_windows(row.windows).recent - rule.recent)
            end = int(step.tiles[place]) - rule.recent
            keep[place, end - newest : end] = True
            pages = dict.fromkeys(token // self._page_size for token in row.boundaries)
            keep[place, [*pages][: (free - newest) // 2]] = True
        return keep if keep.any() else None

    def finish(self, chunks: SequenceOf[Chunk]) -> list[Sequence]:
        """Count what the step did; returns the sequences that go back to the full cache.

        What they computed in this step is not to be used.
        """
        step = self._step
        if step is None:
            return []
        signals = self._measure(chunks, step) if step.shadow else {}
        back = []
        for index, chunk in enumerate(chunks):
            row = chunk.sequence.sparse
            if row is None or not step.skips[index]:
                continue
            read = int(step.kept[:, index].sum())
            total = int(step.tiles[index]) * len(self._layers)
            row.count(chunk.start, read, total)
            self._totals.tiles_read += read
            self._totals.tiles_skipped += total - read
            if index in signals and row.learn(signals[index]):
                self._totals.fallbacks[row.fallback] += 1
                back.append(chunk.sequence)
        return back

    def settle(self, chunks: SequenceOf[Chunk]) -> None:
        """The step is committed; nothing is left to do."""

    def forget(self, sequence: Sequence) -> None:
        """It left the engine; nothing is kept of it here."""

    def stats(self) -> SparseStats:
        return self._totals.stats(self._config.sparsity_ratio)

    # --- a shadow step -----------------------------------------------------------------------
    def _measure(self, chunks: SequenceOf[Chunk], step: SparseStep) -> dict[int, Signals]:
        """Signals of the rows that left tiles out, by their place in the step."""
        probes = self._backend.disarm()
        turn = self._layers[self._turn]
        self._turn = (self._turn + 1) % len(self._layers)
        stale = self._audit(chunks, step)
        sparse = [probes[layer] for layer in dict.fromkeys((self._groups["sparse"], turn))]
        mass = torch.stack([_given(probe.mass_kept) for probe in sparse]).mean(dim=0).tolist()
        read = torch.stack([_given(probe.tiles_read) for probe in sparse]).amax(dim=0).tolist()
        places = [self._layers.index(layer) for layer in (self._groups["sparse"], turn)]
        expected = step.kept[places].max(axis=0)
        entropy = {name: probes[layer].entropy.tolist() for name, layer in self._groups.items()}
        signals = {}
        for index in np.flatnonzero(step.skips).tolist():
            tiles = int(step.tiles[index])
            signals[index] = Signals(
                expected=1.0 - int(expected[index]) / tiles,
                actual=1.0 - read[index] / tiles,
                mass_kept=mass[index],
                entropy=entropy["sparse"][index],
                stale_pages=stale.get(index, 0),
                entropy_by_group={name: values[index] for name, values in entropy.items()},
            )
        self._totals.shadow(signals)
        return signals

    def _audit(self, chunks: SequenceOf[Chunk], step: SparseStep) -> dict[int, int]:
        """How many of some index rows of each row's full pages are wrong."""
        places = np.flatnonzero(step.skips).tolist()
        tables = []
        for index in places:
            pages = chunks[index].sequence.pages
            assert pages is not None
            tables.append(pages.page_ids[: (chunks[index].start + 1) // self._page_size])
        counts = self._backend.audit(tables, self._random)
        self._totals.stale_pages += sum(counts)
        return dict(zip(places, counts, strict=True))


def _is_decode(chunk: Chunk) -> bool:
    """It computes the newest token of an answer; prompts and what is computed again stay dense."""
    return chunk.count == 1 and chunk.start >= chunk.sequence.num_prompt


@dataclass
class SparseTotals:
    """Since start; gauges are of the last shadow step."""

    tiles_read: int = 0
    tiles_skipped: int = 0
    rows: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    shadow_steps: int = 0
    stale_pages: int = 0
    mass_sum: float = 0.0
    mass_count: int = 0
    mass_last: float = math.nan
    actual: float = math.nan
    entropy: dict[str, float] = field(default_factory=dict)

    def shadow(self, signals: dict[int, Signals]) -> None:
        kept = [each.mass_kept for each in signals.values()]
        self.shadow_steps += 1
        self.mass_sum += sum(kept)
        self.mass_count += len(kept)
        self.mass_last = sum(kept) / len(kept)
        self.actual = sum(each.actual for each in signals.values()) / len(signals)
        each_group = [each.entropy_by_group for each in signals.values()]
        for name in each_group[0]:
            new = sum(own[name] for own in each_group) / len(each_group)
            old = self.entropy.get(name, new)
            self.entropy[name] = old + SMOOTHING * (new - old)

    def stats(self, configured_ratio: float) -> SparseStats:
        return SparseStats(
            enabled=True,
            configured_ratio=configured_ratio,
            actual_ratio=self.actual,
            tiles_read=self.tiles_read,
            tiles_skipped=self.tiles_skipped,
            rows=dict(self.rows),
            fallbacks=dict(self.fallbacks),
            shadow_steps=self.shadow_steps,
            stale_pages=self.stale_pages,
            mass_kept_sum=self.mass_sum,
            mass_kept_count=self.mass_count,
            mass_kept=self.mass_last,
            entropy=dict(self.entropy),
        )


def _given(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor


def _layer_groups(layers: tuple[int, ...], depth: int) -> dict[str, int]:
    """One layer that stands for each group: before the sparse ones, they, and after them."""
    groups = {"sparse": layers[len(layers) // 2]}
    if layers[0] > 0:
        groups["first"] = layers[0] // 2
    if layers[-1] < depth - 1:
        groups["last"] = (layers[-1] + depth) // 2
    return groups
