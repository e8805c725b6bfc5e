"""What is measured of an arena's configurations: perplexity after a prefix, and answers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from bench.hysparse.arena import FLOOR, Arena
from bench.hysparse.decoding import Episode
from bench.hysparse.model import Model
from bench.hysparse.report import DENSE_ENOUGH
from bench.hysparse.tasks import Sample, make_samples
from bench.hysparse.texts import read_kind

__all__ = ["STEPS", "Perplexity", "Task"]

STEPS = 128
"""Tokens decoded after a prefix: two pages, which are recent windows to all of them."""


class Perplexity:
    """Negative log-likelihoods of ``STEPS`` tokens after each prefix of each piece of one kind."""

    def __init__(self, arena: Arena, kind: str, prefixes: Sequence[int]) -> None:
        self._arena = arena
        self._kind = kind
        self._prefixes = prefixes
        self._texts = self._pieces()
        self._losses: dict[tuple[str, float], dict[int, list[float]]] = {}

    @property
    def title(self) -> str:
        return f"perplexity {self._kind}"

    def _pieces(self) -> list[torch.Tensor]:
        length = self._prefixes[-1] + STEPS + 1
        ids = self._arena.model.encode(read_kind(self._kind))
        return list(ids.split(length))[: len(ids) // length]

    def measure(self, number: int) -> None:
        """The piece ``number`` of the text, if it is that long."""
        if number >= len(self._texts):
            return
        ids, arena = self._texts[number], self._arena
        context, masks = arena.read(ids[: self._prefixes[-1]], self._prefixes)
        for prefix in self._prefixes:
            episode = Episode(prefix, ids[prefix : prefix + STEPS])
            target = ids[prefix + 1 : prefix + STEPS + 1]
            for name, logits in arena.decode(context.first(prefix), masks, [episode]).items():
                loss = torch.nn.functional.cross_entropy(logits[0], target).item()
                self._losses.setdefault(name, {}).setdefault(prefix, []).append(loss)

    def rows(self) -> list[dict[str, Any]]:
        """One a configuration and prefix."""
        rows = []
        for (name, ratio), by_prefix in self._losses.items():
            for prefix, values in by_prefix.items():
                kept = self._arena.kept(prefix + 1, name)[ratio]
                dense = self._losses["dense", 0.0][prefix]
                differences = [a - b for a, b in zip(values, dense, strict=True)]
                rows.append(
                    {
                        "measure": "perplexity",
                        "kind": self._kind,
                        "tokens": prefix,
                        "name": name,
                        "ratio": ratio,
                        "kept": kept / (prefix + 1),
                        "exercised": kept <= prefix,
                        "below_floor": prefix <= FLOOR,
                        "texts": len(values),
                        "perplexity": math.exp(_mean(values)),
                        "differences": [round(d, 6) for d in differences],
                    }
                )
        return rows


class Task:
    """Questions of one task at one length.

    Args:
        aware: the question is part of the prompt; else it comes after it, token by token, and is
            decoded like the answer.
    """

    def __init__(self, arena: Arena, name: str, tokens: int, aware: bool) -> None:
        self._arena = arena
        self._name = name
        self._tokens = tokens
        self._aware = aware
        self._right: dict[tuple[str, float], int] = defaultdict(int)
        self._asked = 0
        self._prefixes: list[int] = []

    @property
    def title(self) -> str:
        return f"{self._name} {self._tokens}{' aware' if self._aware else ''}"

    def measure(self, number: int) -> None:
        """The sample ``number``."""
        model = self._arena.model
        (sample,) = make_samples(
            self._name, self._tokens - 64, 1, seed=number, size=lambda text: len(model.encode(text))
        )
        for ids, episodes, spans in _episodes(model, sample, self._aware):
            prefix = episodes[0].prefix
            context, masks = self._arena.read(ids[:prefix], [prefix])
            self._asked += len(episodes)
            self._prefixes.append(prefix)
            for key, logits in self._arena.decode(context, masks, episodes).items():
                best = logits.argmax(-1)
                for row, episode, (begin, end) in zip(best, episodes, spans, strict=True):
                    same = torch.equal(row[begin - 1 : end - 1], episode.ids[begin:end])
                    self._right[key] += same

    def rows(self) -> list[dict[str, Any]]:
        """One a configuration."""
        if not self._asked:
            return []
        dense = self._right["dense", 0.0]
        return [
            {
                "measure": "task",
                "task": self._name,
                "tokens": self._tokens,
                "aware": self._aware,
                "name": name,
                "ratio": ratio,
                "kept": _mean(shares := self._kept(name, ratio)),
                "exercised": min(shares) < 1.0,
                "below_floor": self._tokens <= FLOOR,
                "questions": self._asked,
                "right": number,
                "dense_right": dense,
                "told_apart": dense >= DENSE_ENOUGH * self._asked,
            }
            for (name, ratio), number in self._right.items()
        ]

    def _kept(self, name: str, ratio: float) -> list[float]:
        return [self._arena.kept(n + 1, name)[ratio] / (n + 1) for n in self._prefixes]


def _episodes(
    model: Model, sample: Sample, aware: bool
) -> list[tuple[torch.Tensor, list[Episode], list[tuple[int, int]]]]:
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
        return [(prompt, [episode], [(1, 1 + len(answer))])]
    longest = max(len(q) + len(a) for q, a in pairs)
    episodes, spans = [], []
    for question, answer in pairs:
        ids = torch.cat((question, answer))
        padded = torch.nn.functional.pad(ids, (0, longest - len(ids)))
        episodes.append(Episode(len(context), padded))
        spans.append((len(question), len(ids)))
    return [(context, episodes, spans)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
