"""Calibrate the gate on recorded attention: learn to rank pages as the model's own attention does.

The teacher is the attention mass of each page under the model's true scores; the student sees what
the index sees. Nothing here knows where the recordings come from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from bicl.errors import ConfigError
from bicl.ops.cpu.sparse import combine_heads
from bicl.sparse.config import MAX_SPARSITY
from bicl.sparse.selection import SelectionRule
from bicl.sparse.sgm import (
    GATE_DIM,
    Gate,
    PageGate,
    make_gate,
    principal_directions,
    soft_top_k,
)

__all__ = [
    "FitReport",
    "LayerReport",
    "Recording",
    "fit",
]

LEARNING_RATE = 0.02
SOFTNESS = 0.25
RATIO_STEP = 0.05
RATIO_RANGE = (0.5, 1.4)
"""Of the ratio that a fit is for: what a layer may get for its own."""
HELD_OUT = 5
"""Every fifth query is not trained on; the report is about those."""


@dataclass(frozen=True)
class Recording:
    """One layer's attention in one text.

    Attributes:
        query: ``[R, Hq, D]`` after rotary embedding, at ``position`` (int64 ``[R]``).
        key, value: ``[T, H, D]``.
        scale: of the scores.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    position: torch.Tensor
    scale: float


@dataclass(frozen=True)
class LayerReport:
    """Shares of the attention that the left-out pages would have drawn, on held-out queries:
    without a fit, with it, and as the true attention would choose.

    ``ratio``: what the layer leaves out after the fit.
    """

    layer: int
    ratio: float
    before: float
    after: float
    best: float


@dataclass(frozen=True)
class FitReport:
    """Attributes:
    kind: of the gate. parameters: learned numbers, all layers together.
    queries: trained on, held out.
    sparsity: that it was fitted for.
    layers: one report each; ``best`` is what the true attention would choose.
    """

    kind: str
    parameters: int
    queries: tuple[int, int]
    sparsity: float
    layers: tuple[LayerReport, ...]

    def mean(self, what: str) -> float:
        return float(sum(getattr(layer, what) for layer in self.layers)) / len(self.layers)


@dataclass(frozen=True)
class _Lesson:
    """Pages of one recording: what the student sees, what the teacher knows.

    ``mass`` float32 ``[R, Hq, W]``; ``scored`` and ``candidate`` bool ``[R, W]``, what a softmax
    runs over and what competes; ``tiles`` int32 ``[R]``; ``position`` int64 ``[R]``.
    """

    query: torch.Tensor
    pages: torch.Tensor  # index rows [W, H, rows, dims], or keys [W, P, H, D]
    recording: Recording
    mass: torch.Tensor
    scored: torch.Tensor
    candidate: torch.Tensor
    tiles: torch.Tensor
    position: torch.Tensor
    page_size: int
    num_kv_heads: int
    scale: float

    def budget(self, rule: SelectionRule, sparsity: float) -> torch.Tensor:
        """int32 ``[R]``, pages to choose among the candidates; all of them: nothing is left out."""
        kept = rule.tiles_to_keep(self.tiles, torch.full((len(self.tiles),), sparsity))
        candidates = self.candidates
        return (kept - (self.tiles - candidates)).clamp_min(0).minimum(candidates)

    @property
    def candidates(self) -> torch.Tensor:
        return self.candidate.sum(dim=1, dtype=torch.int32)

    def outputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's output ``[R, H, group, D]``, and what each page adds to it
        ``[R, H, group, W, D]``."""
        share = _attention(self.recording, self.query, self.position)
        value, pages = self.recording.value.float(), self.mass.shape[2]
        output = torch.einsum("rhgt,thd->rhgd", share, value)
        size = self.page_size
        by_page = share[..., : pages * size].reshape(*share.shape[:3], pages, size)
        held = value[: pages * size].reshape(pages, size, *value.shape[1:])
        return output, torch.einsum("rhgwp,wphd->rhgwd", by_page, held)


def fit(
    recordings: Mapping[int, Sequence[Recording]],
    kind: str,
    rule: SelectionRule,
    sparsity: float,
    *,
    steps: int = 150,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Gate, FitReport]:
    """Fit a gate of ``kind`` to what was recorded of each sparse layer.

    Args:
        recordings: by layer number, at least one text each.
        rule: which pages are always kept, how many in all.
        sparsity: share of the pages that will be left out.
        steps: of the optimiser, for each layer, or for all of them (``gate``).
        progress: called with steps done and steps to do.

    Raises:
        ConfigError: texts too short to leave anything out.
    """
    head_dim = next(iter(recordings.values()))[0].key.shape[2]
    basis = None
    if kind == "gate" and head_dim > GATE_DIM:
        keys = [own.key.flatten(0, 1) for each in recordings.values() for own in each]
        basis = principal_directions(torch.cat(keys).float())
    gate = make_gate(kind, tuple(recordings), head_dim, basis)
    lessons: dict[int, list[_Lesson]] = {}
    held: dict[int, list[_Lesson]] = {}
    for layer, own in recordings.items():
        for recording in own:
            pages = _pages(recording, gate, rule)
            for out, target in ((False, lessons), (True, held)):
                place = torch.arange(len(recording.position))
                chosen = (place % HELD_OUT == HELD_OUT - 1) == out
                target.setdefault(layer, []).append(_lesson(recording, chosen, pages, rule))
    every = [lesson for own in lessons.values() for lesson in own]
    if all(torch.equal(each.budget(rule, sparsity), each.candidates) for each in every):
        raise ConfigError(
            f"the texts are too short: up to {rule.always} pages of {rule.page_size} tokens "
            "nothing is left out; give longer ones"
        )
    task = _Task(rule, sparsity)
    before = {layer: task.lost(gate, layer, own, sparsity) for layer, own in held.items()}
    task.train(gate, lessons, steps, progress)
    ratios = dict.fromkeys(lessons, sparsity)
    if isinstance(gate, PageGate):
        # Where the floor decides, a ratio changes nothing: it is shared out as if there was none.
        ratios = _Task(replace(rule, floor=0), sparsity).share_out(gate, lessons)
        gate.shares.copy_(torch.tensor([ratios[layer] / sparsity for layer in gate.layers]))
    layers = tuple(
        LayerReport(
            layer,
            ratios[layer],
            before[layer],
            task.lost(gate, layer, own, ratios[layer]),
            task.lost(None, layer, own, sparsity),
        )
        for layer, own in held.items()
    )
    counts = [sum(len(x.query) for x in next(iter(each.values()))) for each in (lessons, held)]
    learned = sum(p.numel() for p in gate.parameters())
    return gate, FitReport(kind, learned, (counts[0], counts[1]), sparsity, layers)


@dataclass(frozen=True)
class _Task:
    """What is fitted for: how many pages a row reads."""

    rule: SelectionRule
    sparsity: float

    def train(
        self,
        gate: Gate,
        lessons: dict[int, list[_Lesson]],
        steps: int,
        progress: Callable[[int, int], None],
    ) -> None:
        optimiser = torch.optim.Adam(gate.parameters(), lr=LEARNING_RATE)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
        for step in range(steps):
            optimiser.zero_grad()
            for layer, own in lessons.items():
                loss = torch.stack([self.loss(gate, layer, lesson) for lesson in own]).mean()
                (loss / len(lessons)).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            schedule.step()
            progress(step + 1, steps)

    def loss(self, gate: Gate, layer: int, lesson: _Lesson) -> torch.Tensor:
        """Distillation (cross entropy to the teacher's mass over the candidates) plus what a soft
        top-K of the combined scores would lose."""
        scores = _scores(gate, layer, lesson)
        hidden = ~lesson.candidate[:, None]
        target = lesson.mass.masked_fill(hidden, 0.0)
        logs = scores.masked_fill(hidden, -torch.inf).log_softmax(dim=-1).masked_fill(hidden, 0.0)
        distilled = -(target * logs).sum(dim=-1).mean()
        budget = lesson.budget(self.rule, self.sparsity)
        rows = (budget > 0) & (budget < lesson.candidates)
        if not rows.any():
            return distilled
        heads = lesson.num_kv_heads
        share = combine_heads(scores[rows], lesson.scored[rows], heads, "softmax")
        share = share.clamp_min(1e-9).log().masked_fill(hidden[rows], -torch.inf)
        kept = soft_top_k(share, budget[rows, None].expand(-1, heads).float(), SOFTNESS)
        kept = kept.masked_fill(hidden[rows], 0.0)
        kept = kept.repeat_interleave(target.shape[1] // heads, dim=1)
        return distilled + (target[rows] * (1.0 - kept)).sum(dim=-1).mean()

    def share_out(self, gate: Gate, lessons: dict[int, list[_Lesson]]) -> dict[int, float]:
        """A ratio for each layer, whose mean is the task's: layers whose attention lies in few
        pages leave out more, those in which it is spread leave out less.

        What a layer loses is the error of its output, not the attention: keys that draw much of
        it may hold values like all others. Steps of a ratio are moved from the layer that gains
        most by one less to the one that loses least by one more, as long as the squares of the
        errors add up to less.
        """
        low, high = (self.sparsity * share for share in RATIO_RANGE)
        high = min(high, MAX_SPARSITY)
        below, above = (int(abs(end - self.sparsity) / RATIO_STEP + 1e-6) for end in (low, high))
        steps = range(-below, above + 1)
        ratios = [self.sparsity + step * RATIO_STEP for step in steps]
        cost = {
            (layer, step): error
            for layer, own in lessons.items()
            for step, error in zip(steps, self._errors(gate, layer, own, ratios), strict=True)
        }
        at = dict.fromkeys(lessons, 0)
        while True:
            up = {n: cost[n, at[n] + 1] - cost[n, at[n]] for n in at if at[n] < above}
            down = {n: cost[n, at[n]] - cost[n, at[n] - 1] for n in at if at[n] > -below}
            pairs = [(down[b] - up[a], a, b) for a in up for b in down if a != b]
            gain, more, less = max(pairs, default=(0.0, 0, 0))
            if gain <= 0.0:
                return {n: self.sparsity + step * RATIO_STEP for n, step in at.items()}
            at[more] += 1
            at[less] -= 1

    @torch.no_grad()
    def _errors(
        self, gate: Gate, layer: int, lessons: Sequence[_Lesson], ratios: Sequence[float]
    ) -> list[float]:
        """At each ratio the mean square of the relative error of the layer's output."""
        found = []
        for lesson in lessons:
            output, added = lesson.outputs()
            whole = output.square().sum(dim=(1, 2, 3))
            mass = _grouped(lesson.mass, lesson.num_kv_heads)
            rank = _rank(gate, layer, lesson)
            for ratio in ratios:
                out = self._left_out(rank, lesson, ratio)[:, :, None].float()
                missing = torch.einsum("rhgwd,rhgw->rhgd", added, out.expand_as(mass))
                rest = (1.0 - (mass * out).sum(dim=-1, keepdim=True)).clamp_min(1e-6)
                error = (output - missing) / rest - output
                found.append(error.square().sum(dim=(1, 2, 3)) / whole.clamp_min(1e-12))
        errors = torch.stack([own.mean() for own in found]).view(len(lessons), len(ratios))
        return [float(error) for error in errors.mean(dim=0)]

    def lost(
        self, gate: Gate | None, layer: int, lessons: Sequence[_Lesson], ratio: float
    ) -> float:
        """Mean share of a head's attention in the pages left out; ``None``: as the teacher
        chooses."""
        return float(torch.cat(self._lost(gate, layer, lessons, ratio)).mean())

    @torch.no_grad()
    def _lost(
        self, gate: Gate | None, layer: int, lessons: Sequence[_Lesson], ratio: float
    ) -> list[torch.Tensor]:
        """Of each row in which something is left out, and each head."""
        lost = [torch.zeros(1)]
        for lesson in lessons:
            out = self._left_out(_rank(gate, layer, lesson), lesson, ratio)
            rows = out.any(dim=(1, 2))
            if rows.any():
                mass = _grouped(lesson.mass[rows], lesson.num_kv_heads)
                lost.append((mass * out[rows][:, :, None]).sum(dim=-1).flatten())
        return lost if len(lost) == 1 else lost[1:]

    def _left_out(self, rank: torch.Tensor, lesson: _Lesson, ratio: float) -> torch.Tensor:
        """bool ``[R, H, W]``."""
        budget = lesson.budget(self.rule, ratio)
        return (rank >= budget[:, None, None]) & lesson.candidate[:, None]


@torch.no_grad()
def _rank(gate: Gate | None, layer: int, lesson: _Lesson) -> torch.Tensor:
    """int64 ``[R, H, W]``, places of the candidates: by a gate, or as the teacher has it."""
    heads, true = lesson.num_kv_heads, lesson.mass.clamp_min(1e-12).log()
    scores = true if gate is None else _scores(gate, layer, lesson)
    share = combine_heads(scores, lesson.scored, heads, "softmax")
    share = share.masked_fill(~lesson.candidate[:, None], -1.0)
    return share.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)


def _pages(recording: Recording, gate: Gate, rule: SelectionRule) -> torch.Tensor:
    """What a student sees of the full pages."""
    key, size = recording.key.float(), rule.page_size
    pages = key[: len(key) // size * size].view(-1, size, *key.shape[1:])
    return gate.describe(pages.transpose(1, 2)) if isinstance(gate, PageGate) else pages


def _lesson(
    recording: Recording, chosen: torch.Tensor, pages: torch.Tensor, rule: SelectionRule
) -> _Lesson:
    query, position = recording.query[chosen].float(), recording.position[chosen]
    key = recording.key.float()
    size, heads = rule.page_size, key.shape[1]
    width = len(key) // size
    share = _attention(recording, query, position).flatten(1, 2)
    mass = share[..., : width * size].reshape(*share.shape[:2], width, size).sum(dim=-1)
    tiles = (position // size + 1).int()
    place = torch.arange(width)
    scored = place < (tiles - rule.recent)[:, None]
    candidate = scored & (place >= rule.first)
    return _Lesson(
        query,
        pages,
        recording,
        mass,
        scored,
        candidate,
        tiles,
        position,
        size,
        heads,
        recording.scale,
    )


def _attention(recording: Recording, query: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """What queries draw from every key, float32 ``[R, H, group, T]``."""
    key = recording.key.float()
    scores = torch.einsum("rhgd,thd->rhgt", _grouped(query, key.shape[1]), key)
    seen = torch.arange(len(key)) <= position[:, None]
    hidden = ~seen[:, None, None]
    return scores.mul_(recording.scale).masked_fill_(hidden, -torch.inf).softmax(dim=-1)


def _grouped(rows: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """``[R, Hq, x]`` to ``[R, H, group, x]``."""
    return rows.reshape(len(rows), num_kv_heads, -1, rows.shape[2])


def _scores(gate: Gate, layer: int, lesson: _Lesson) -> torch.Tensor:
    """float32 ``[R, Hq, W]``, as the index will give them."""
    query = lesson.query
    if isinstance(gate, PageGate):
        pages, heads = lesson.pages.transpose(0, 1)[None], lesson.num_kv_heads
        rows = _grouped(query, heads).transpose(0, 1).reshape(1, -1, query.shape[2])
        scores = gate.score(rows, pages, gate.weights_of(layer), lesson.scale)
        return scores.view(heads, len(query), -1, pages.shape[2]).transpose(0, 1).flatten(1, 2)
    keys = gate.project(lesson.pages, "key").mean(dim=1)
    directions = _grouped(gate.project(query, "query"), keys.shape[1])
    return torch.einsum("rhgd,whd->rhgw", directions, keys).flatten(1, 2) * gate.sharpness
