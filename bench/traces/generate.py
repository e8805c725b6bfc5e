"""Make a trace in Mooncake's format when the public ones are not at hand.

    python -m bench.traces.generate --profile conversation --out trace.jsonl [--seed 0]

A profile is a model of conversations: they arrive evenly at random; the number of turns follows a
power law; a turn's prompt is the one before, its reply and a new message; people think for a
lognormal time between turns. The parameters were fitted to the published figures that stand in
:data:`PUBLISHED`, and the command prints both. A made trace serves where a machine must have
*some* traffic of this kind; hit rates that are quoted come from the public traces.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.traces import ideal
from bench.traces.mooncake import BLOCK_TOKENS, TraceRequest, write

__all__ = ["PROFILES", "PUBLISHED", "Profile", "describe", "generate"]

MAX_TURNS = 43


@dataclass(frozen=True)
class Lognormal:
    median: float
    sigma: float
    most: float = float("inf")

    def draw(self, rng: random.Random) -> float:
        return min(self.most, self.median * rng.lognormvariate(0.0, self.sigma))


@dataclass(frozen=True)
class Profile:
    """Parameters of one kind of traffic.

    Attributes:
        conversations: that begin within ``seconds``.
        turns_exponent: probability of ``k`` turns falls as ``k ** -turns_exponent``.
        system_tokens: tokens that all conversations begin with.
        prompt, message, reply: tokens of a first prompt, of each later message, of a reply.
        long_factor: first prompts of conversations with more than one turn are longer by this.
        think: seconds between a turn and the next.
    """

    conversations: int
    seconds: float
    turns_exponent: float
    system_tokens: int
    prompt: Lognormal
    long_factor: float
    message: Lognormal
    reply: Lognormal
    think: Lognormal


PROFILES = {
    "conversation": Profile(
        conversations=7373,
        seconds=3537,
        turns_exponent=2.27,
        system_tokens=512,
        prompt=Lognormal(5880, 1.32, 126_000),
        long_factor=0.63,
        message=Lognormal(660, 1.19, 60_000),
        reply=Lognormal(252, 0.82, 2_000),
        think=Lognormal(173, 1.26),
    ),
    "synthetic": Profile(
        conversations=2224,
        seconds=1022,
        turns_exponent=1.77,
        system_tokens=0,
        prompt=Lognormal(2020, 0.73, 126_000),
        long_factor=8.0,
        message=Lognormal(140, 0.80, 60_000),
        reply=Lognormal(49, 1.5, 2_000),
        think=Lognormal(63, 1.7),
    ),
}

PUBLISHED = {
    "conversation": {
        "requests": 12_031, "prompt mean": 12_035, "prompt p50": 6_909, "prompt p90": 27_367,
        "reply mean": 343, "hit rate, infinite": 0.374,
        "hit rate, 0.5M": 0.045, "hit rate, 1.5M": 0.066, "hit rate, 5.1M": 0.215,
        "hit rate, 15.4M": 0.332,
    },
    "synthetic": {
        "requests": 3_993, "prompt mean": 15_325, "prompt p50": 11_587, "prompt p90": 38_615,
        "reply mean": 149, "hit rate, infinite": 0.651,
        "hit rate, 0.5M": 0.084, "hit rate, 1.5M": 0.191, "hit rate, 5.1M": 0.431,
        "hit rate, 15.4M": 0.636,
    },
}  # fmt: skip
"""Figures of Mooncake's own traces, computed from the files of its FAST'25 release."""


def generate(profile: Profile, seed: int = 0) -> list[TraceRequest]:
    """Requests in the order of arrival, none after ``profile.seconds``."""
    rng = random.Random(seed)
    weights = [k**-profile.turns_exponent for k in range(1, MAX_TURNS + 1)]
    names = itertools.count(-(-profile.system_tokens // BLOCK_TOKENS))
    found: list[TraceRequest] = []
    for _ in range(profile.conversations):
        turns = rng.choices(range(1, MAX_TURNS + 1), weights)[0]
        found += _conversation(profile, turns, names, rng)
    return sorted(found, key=lambda request: request.arrival)


def _conversation(
    profile: Profile, turns: int, names: Iterator[int], rng: random.Random
) -> Iterator[TraceRequest]:
    at = rng.uniform(0, profile.seconds)
    blocks = list(range(-(-profile.system_tokens // BLOCK_TOKENS)))
    prompt = profile.prompt.draw(rng) * (profile.long_factor if turns > 1 else 1.0)
    length = profile.system_tokens + max(1, int(min(prompt, profile.prompt.most)))
    for _ in range(turns):
        if at > profile.seconds or length > profile.prompt.most:
            return
        missing = -(-length // BLOCK_TOKENS) - len(blocks)
        blocks += itertools.islice(names, missing)
        reply = max(1, int(profile.reply.draw(rng)))
        yield TraceRequest(at, length, reply, tuple(blocks))
        if length % BLOCK_TOKENS:
            blocks.pop()  # the block that was not full gets another name when it grows
        length += reply + max(1, int(profile.message.draw(rng)))
        at += profile.think.draw(rng)


def describe(requests: Sequence[TraceRequest]) -> dict[str, float]:
    """The figures of :data:`PUBLISHED`."""
    lengths = np.array([request.input_length for request in requests])
    rates = {
        f"hit rate, {name}": ideal.lru(requests, pages and int(pages * 1e6 / BLOCK_TOKENS), 512)
        for name, pages in (
            ("infinite", None), ("0.5M", 0.5), ("1.5M", 1.5), ("5.1M", 5.1), ("15.4M", 15.4)
        )
    }  # fmt: skip
    return {
        "requests": len(requests),
        "prompt mean": float(lengths.mean()),
        "prompt p50": float(np.percentile(lengths, 50)),
        "prompt p90": float(np.percentile(lengths, 90)),
        "reply mean": float(np.mean([request.output_length for request in requests])),
        **rates,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", choices=PROFILES, default="conversation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    requests = generate(PROFILES[options.profile], options.seed)
    write(requests, options.out)
    print(f"{'':22}{'made':>10}{'published':>12}")
    for name, value in describe(requests).items():
        digits = 3 if value < 1 else 0
        print(f"{name:22}{value:10.{digits}f}{PUBLISHED[options.profile][name]:12.{digits}f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
