"""Choosing the next token of every row. Rules, their order and their logprobs are TGI's.

watermark, repetition penalty, frequency penalty, grammar, temperature, top-k, top-p, typical-p;
then a draw (or argmax). Log-probabilities are those after all rules.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from bicl.attention.results import ResultCopies
from bicl.frontends.http.engine.grammar import GrammarState
from bicl.frontends.http.request import GenerationParams

__all__ = ["Choice", "Chosen", "SamplingState", "choose"]

WATERMARK_GAMMA = 0.5
WATERMARK_DELTA = 2.0
WATERMARK_HASH_KEY = 15485863


class SamplingState:
    """What one request's choices depend on besides the logits.

    The generator advances by one draw of the vocabulary's size a token, whatever the batch: the
    same seed gives the same tokens alone, batched and after a preemption.
    """

    def __init__(
        self, params: GenerationParams, grammar: GrammarState | None, device: torch.device
    ) -> None:
        self.params = params
        self.grammar = grammar
        self.draws = (
            params.do_sample
            or params.temperature != 1.0
            or params.top_k != 0
            or params.top_p < 1.0
            or params.typical_p < 1.0
        )
        self.forced = deque(params.forced_ids)
        self.generator = torch.Generator(device)
        self.generator.manual_seed(params.seed & (2**63 - 1))
        self.plain = not (
            self.draws
            or params.watermark
            or params.repetition_penalty != 1.0
            or params.frequency_penalty != 0.0
            or grammar is not None
        )


@dataclass(frozen=True)
class Choice:
    """A row's token. ``top``: ``top_n_tokens`` ids with logprobs, ties included. ``error`` stands
    for everything else where the row's own rules failed."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    error: Exception | None = None


@dataclass
class _Row:
    state: SamplingState
    history: Sequence[int]
    error: Exception | None = field(default=None)


class Chosen:
    """Tokens on their way to the host. What is issued on the device's stream from now on comes
    behind them."""

    def __init__(
        self, tokens: torch.Tensor, logprobs: torch.Tensor, rows: list[_Row], copies: ResultCopies
    ) -> None:
        self._logprobs = logprobs
        self._rows = rows
        self._copy = copies.begin(tokens, logprobs.gather(1, tokens[:, None]).squeeze(1))

    def read(self) -> list[Choice]:
        """Wait for the device."""
        choices = []
        for i, (row, token, value) in enumerate(zip(self._rows, *self._copy.lists(), strict=True)):
            wanted = row.state.params.top_n_tokens
            top = _top(self._logprobs[i], wanted) if wanted else ()
            choices.append(Choice(token, value, top, row.error))
        return choices


def choose(
    logits: torch.Tensor,
    states: Sequence[SamplingState],
    histories: Sequence[Sequence[int]],
    copies: ResultCopies,
) -> Chosen:
    """Choose a token for each row. Waits for the device only where a rule must.

    Args:
        logits: float32 ``[n, vocab_size]``; overwritten.
        states: of the rows; their generators advance.
        histories: token ids of each row so far, prompt included.
        copies: bring the tokens to the host.
    """
    rows = [_Row(state, ids) for state, ids in zip(states, histories, strict=True)]
    if not all(state.plain for state in states):
        _apply_rules(logits, rows)
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = _draw(logits, rows)
    for i, state in enumerate(states):
        if state.forced:
            chosen[i] = state.forced.popleft()
    return Chosen(chosen, logprobs, rows, copies)


def _draw(scores: torch.Tensor, rows: list[_Row]) -> torch.Tensor:
    chosen = scores.argmax(dim=-1)
    drawn = [i for i, row in enumerate(rows) if row.state.draws]
    for i in drawn:
        # Exponential race: one pass, no sort, no cumulative sum, no wait for the device.
        probs = torch.softmax(scores[i], dim=-1)
        race = torch.empty_like(probs).exponential_(1, generator=rows[i].state.generator)
        chosen[i] = probs.div_(race).argmax()
    return chosen


def _top(logprobs: torch.Tensor, n: int) -> tuple[tuple[int, float], ...]:
    """The ``n`` best; if others tie with the last of them, those too."""
    n = min(n, logprobs.shape[0])
    last = logprobs.topk(n).values[-1].clamp_min(torch.finfo(logprobs.dtype).min)
    count = int((logprobs >= last).sum())
    values, ids = logprobs.topk(count)
    return tuple(zip(ids.tolist(), values.tolist(), strict=True))


# --- rules -------------------------------------------------------------------------------------
def _apply_rules(scores: torch.Tensor, rows: list[_Row]) -> None:
    _each(scores, rows, lambda s: s.params.watermark, _watermark)
    _each(scores, rows, lambda s: s.params.repetition_penalty != 1.0, _repetition)
    _each(scores, rows, lambda s: s.params.frequency_penalty != 0.0, _frequency)
    _each(scores, rows, lambda s: s.grammar is not None, _grammar)
    _together(scores, rows, lambda p: p.temperature, 1.0, _temperature)
    _together(scores, rows, lambda p: p.top_k, 0, _top_k)
    _together(scores, rows, lambda p: p.top_p, 1.0, _top_p)
    _together(scores, rows, lambda p: p.typical_p, 1.0, _typical_p)


def _each(
    scores: torch.Tensor,
    rows: list[_Row],
    active: Callable[[SamplingState], bool],
    rule: Callable[[torch.Tensor, _Row], None],
) -> None:
    for i, row in enumerate(rows):
        if row.error is None and active(row.state):
            try:
                rule(scores[i], row)
            except Exception as error:  # this row's own fault: the others go on
                row.error = error


def _together(
    scores: torch.Tensor,
    rows: list[_Row],
    value: Callable[[GenerationParams], float],
    neutral: float,
    rule: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """Apply a rule to the rows whose parameter is not neutral, all at once."""
    active = [i for i, row in enumerate(rows) if value(row.state.params) != neutral]
    if not active:
        return
    values = torch.tensor([value(rows[i].state.params) for i in active], device=scores.device)
    if len(active) == len(rows):
        scores.copy_(rule(scores, values[:, None]))
    else:
        scores[active] = rule(scores[active], values[:, None])


def _watermark(scores: torch.Tensor, row: _Row) -> None:
    """Green-list watermark: favour half of the vocabulary, chosen by the previous token."""
    generator = torch.Generator(scores.device)
    generator.manual_seed(WATERMARK_HASH_KEY * row.history[-1])
    size = scores.shape[0]
    order = torch.randperm(size, device=scores.device, generator=generator)
    scores[order[: int(size * WATERMARK_GAMMA)]] += WATERMARK_DELTA


def _repetition(scores: torch.Tensor, row: _Row) -> None:
    ids = torch.tensor(sorted(set(row.history)), device=scores.device)
    penalty, seen = row.state.params.repetition_penalty, scores[ids]
    scores[ids] = torch.where(seen < 0, seen * penalty, seen / penalty)


def _frequency(scores: torch.Tensor, row: _Row) -> None:
    ids = torch.tensor(row.history, device=scores.device)
    share = torch.bincount(ids, minlength=scores.shape[0])[: scores.shape[0]] / len(row.history)
    scores -= share * row.state.params.frequency_penalty


def _grammar(scores: torch.Tensor, row: _Row) -> None:
    assert row.state.grammar is not None
    allowed = row.state.grammar.allowed().to(scores.device)
    scores.masked_fill_(~allowed, -math.inf)


def _temperature(scores: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    return scores / temperature


def _top_k(scores: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    k = k.long().clamp(max=scores.shape[-1])
    best = scores.topk(int(k.max())).values
    return scores.masked_fill(scores < best.gather(1, k - 1), -math.inf)


def _top_p(scores: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    ascending, order = scores.sort(dim=-1)
    remove = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
    remove[:, -1] = False
    return scores.masked_fill(remove.scatter(1, order, remove), -math.inf)


def _typical_p(scores: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    logprobs = scores.log_softmax(dim=-1)
    entropy = -(logprobs * logprobs.exp()).nansum(dim=-1, keepdim=True)
    surprise, order = (-logprobs - entropy).abs().sort(dim=-1)
    cumulative = scores.gather(1, order).softmax(dim=-1).cumsum(dim=-1)
    last = (cumulative < mass).sum(dim=1, keepdim=True).clamp(max=scores.shape[-1] - 1)
    remove = surprise > surprise.gather(1, last)
    return scores.masked_fill(remove.scatter(1, order, remove), -math.inf)
