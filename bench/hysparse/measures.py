"""What is measured of an arena's configurations: perplexity after a prefix, and answers.

An *item* is one context, under every configuration of the arena: a piece of text with all its
prefixes, or one sample of a task. It is done as a whole or not at all.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from bench.hysparse.arena import FLOOR, PAGE, Arena, Key
from bench.hysparse.decoding import Episode
from bench.hysparse.model import Model
from bench.hysparse.tasks import TASKS, Sample, make_samples
from bench.hysparse.texts import KINDS, read_kind
from bicl.sparse.policy import classify

__all__ = ["RARELY", "STEPS", "Item", "Perplexity", "Task", "plan"]

STEPS = 128
"""Tokens decoded after a prefix: two pages, which are recent windows to all of them."""


RARELY = ("words",)
"""Asked in every fourth round: a model this small solves none, which says nothing of a cache."""


class Item(Protocol):
    @property
    def title(self) -> str:
        """Names it in all runs."""

    def measure(self, arena: Arena) -> list[dict[str, Any]]:
        """A record for each length; empty if there is no such text."""


def plan(
    rounds: Sequence[int], prefixes: Sequence[int], lengths: Sequence[int], only: str | None
) -> Iterator[Item]:
    """Round by round a piece of each kind of text and a sample of each task at each length: a
    shorter run is a smaller sample of the same."""
    for number in rounds:
        if only != "tasks":
            yield from (Perplexity(kind, number, tuple(prefixes)) for kind in KINDS)
        if only != "perplexity":
            tasks = [
                Task(name, length, aware, number)
                for length in lengths
                for name in TASKS
                for aware in (False, True)
                if name not in RARELY or number % 4 == 0
            ]
            random.Random(number).shuffle(tasks)  # wherever it ends, no length is ahead
            yield from tasks


@dataclass(frozen=True)
class Perplexity:
    """The negative log-likelihood of ``STEPS`` tokens after each prefix of a piece of text."""

    kind: str
    number: int
    prefixes: tuple[int, ...]

    @property
    def title(self) -> str:
        return f"perplexity {self.kind} {self.number} {' '.join(map(str, self.prefixes))}"

    def measure(self, arena: Arena) -> list[dict[str, Any]]:
        length = max(self.prefixes) + STEPS + 1
        ids = arena.model.encode(read_kind(self.kind))
        ids = ids[self.number * length : (self.number + 1) * length]
        if len(ids) < length:
            return []
        context, masks = arena.read(ids[: max(self.prefixes)], self.prefixes)
        records = []
        for prefix in self.prefixes:
            episode = Episode(prefix, ids[prefix : prefix + STEPS])
            targets = ids[None, prefix + 1 : prefix + STEPS + 1]
            text_kind = classify(arena.model.tokenizer.decode(ids[:prefix]))
            keys, losses, _ = arena.decode(
                context.first(prefix), masks, [episode], targets, text_kind
            )
            own = [round(loss, 6) for loss in losses.mean(dim=(1, 2)).tolist()]
            record = {"measure": "perplexity", "kind": self.kind, "piece": self.number}
            records.append(record | _record(arena, prefix, prefix, text_kind, keys, own))
        return records


@dataclass(frozen=True)
class Task:
    """The questions of one sample of a task at one length.

    Attributes:
        aware: the question is part of the prompt; else it comes after it, token by token, and is
            decoded like the answer.
    """

    name: str
    tokens: int
    aware: bool
    number: int

    @property
    def title(self) -> str:
        return f"task {self.name} {self.tokens} {'aware' if self.aware else 'after'} {self.number}"

    def measure(self, arena: Arena) -> list[dict[str, Any]]:
        model = arena.model
        (sample,) = make_samples(self.name, self.tokens - 64, 1, seed=self.number, size=model.count)
        ids, episodes, spans = _episodes(model, sample, self.aware)
        prefix = episodes[0].prefix
        context, masks = arena.read(ids[:prefix], [prefix])
        targets = torch.stack([torch.nn.functional.pad(e.ids[1:], (0, 1)) for e in episodes])
        text_kind = classify(model.tokenizer.decode(ids))
        keys, _, right = arena.decode(context, masks, episodes, targets, text_kind)
        answered = torch.stack(
            [right[:, i, begin - 1 : end - 1].all(dim=1) for i, (begin, end) in enumerate(spans)]
        )
        own = answered.sum(dim=0).tolist()
        record = {
            "measure": "task",
            "task": self.name,
            "aware": self.aware,
            "sample": self.number,
            "questions": len(episodes),
        }
        return [record | _record(arena, self.tokens, prefix, text_kind, keys, own)]


def _record(
    arena: Arena,
    tokens: int,
    prefix: int,
    text_kind: str,
    keys: Sequence[Key],
    values: Sequence[float],
) -> dict[str, Any]:
    """``results``: name, ratio, share of the keys that a sparse layer reads, and a mean loss or a
    number of right answers."""
    length = prefix + 1
    results = []
    for (name, ratio), value in zip(keys, values, strict=True):
        kept = arena.kept((name, ratio), length, text_kind) / length
        results.append([name, ratio, round(kept, 4), value])
    return {
        "tokens": tokens,
        "text_kind": text_kind,
        "below_floor": prefix <= FLOOR,
        "results": results,
    }


def _episodes(
    model: Model, sample: Sample, aware: bool
) -> tuple[torch.Tensor, list[Episode], list[tuple[int, int]]]:
    """Context ids, episodes of one length, and where each of them holds its answer."""
    context = model.encode(sample.context)
    pairs = [
        (model.encode(question), model.encode(answer))
        for question, answer in zip(sample.questions, sample.answers, strict=True)
    ]
    if aware:  # a context of its own for each question: one is enough
        question, answer = pairs[0]
        prompt = torch.cat((context, question))
        episode = Episode(len(prompt) - 1, torch.cat((prompt[-1:], answer)))
        return prompt, [episode], [(1, 1 + len(answer))]
    pairs = [(q, a) for q, a in pairs if len(q) + len(a) <= PAGE]  # what recent windows hold
    longest = max(len(q) + len(a) for q, a in pairs)
    episodes, spans = [], []
    for question, answer in pairs:
        ids = torch.cat((question, answer))
        padded = torch.nn.functional.pad(ids, (0, longest - len(ids)))
        episodes.append(Episode(len(context), padded))
        spans.append((len(question), len(ids)))
    return context, episodes, spans
