"""The public Mooncake trace format, and token ids made from it.

One JSON object a line: ``timestamp`` (ms), ``input_length``, ``output_length`` (tokens) and
``hash_ids``, one for each 512-token block of the prompt. Equal ids mean equal tokens and an equal
history, so a common beginning of two lists is a common prefix of two prompts. The traces hold no
tokens; :class:`Tokens` makes them from the ids, the same ones in every process.

Format and traces: https://github.com/kvcache-ai/Mooncake, folder ``FAST25-release``. None are kept
in this repository.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bicl.errors import InvalidInputError

__all__ = ["BLOCK_TOKENS", "Tokens", "TraceRequest", "read", "scale", "thin", "window", "write"]

BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace.

    Attributes:
        arrival: seconds since the trace began.
        input_length, output_length: tokens; at least 1 each.
        hash_ids: names of the prompt's blocks, the last of which may not be full.
        block_tokens: tokens a block; 512 unless the trace was scaled down.
    """

    arrival: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    block_tokens: int = BLOCK_TOKENS


def read(path: Path) -> list[TraceRequest]:
    """Read a trace, in the order of arrival.

    Raises:
        InvalidInputError: naming the line and what is wrong with it.
    """
    requests = []
    with path.open() as lines:
        for number, line in enumerate(lines, 1):
            try:
                requests.append(_parse(line))
            except (KeyError, TypeError, ValueError) as error:
                raise InvalidInputError(f"{path}, line {number}: {error!r}") from error
    if not requests:
        raise InvalidInputError(f"{path} holds no requests")
    return sorted(requests, key=lambda request: request.arrival)


def _parse(line: str) -> TraceRequest:
    entry = json.loads(line)
    ids, length = tuple(entry["hash_ids"]), int(entry["input_length"])
    if length < 1 or len(ids) != -(-length // BLOCK_TOKENS):
        raise ValueError(f"{len(ids)} hash_ids do not cover {length} tokens")
    return TraceRequest(entry["timestamp"] / 1000, length, max(1, int(entry["output_length"])), ids)


def write(requests: Iterable[TraceRequest], path: Path) -> None:
    """Write a trace in the public format."""
    with path.open("w") as lines:
        for request in requests:
            entry = {
                "timestamp": round(request.arrival * 1000),
                "input_length": request.input_length,
                "output_length": request.output_length,
                "hash_ids": list(request.hash_ids),
            }
            lines.write(json.dumps(entry) + "\n")


def scale(requests: Iterable[TraceRequest], block_tokens: int) -> list[TraceRequest]:
    """Shrink every block to ``block_tokens`` tokens, and prompts and replies with it, for a
    machine on which the whole trace would take days. Which blocks are shared stays as it was."""
    factor = block_tokens / BLOCK_TOKENS

    def shrink(request: TraceRequest) -> TraceRequest:
        whole = (len(request.hash_ids) - 1) * block_tokens
        rest = request.input_length - (len(request.hash_ids) - 1) * BLOCK_TOKENS
        return replace(
            request,
            input_length=whole + max(1, round(rest * factor)),
            output_length=max(1, round(request.output_length * factor)),
            block_tokens=block_tokens,
        )

    return [shrink(request) for request in requests]


def thin(requests: Sequence[TraceRequest], share: float, seed: int = 0) -> list[TraceRequest]:
    """Keep about ``share`` of the conversations, each with all its turns.

    A conversation is what has the first two blocks in common (the first alone is often a system
    prompt of all). Taking every tenth request instead would tear turns apart.
    """
    rng = random.Random(seed)
    chosen: dict[tuple[int, ...], bool] = {}
    return [r for r in requests if chosen.setdefault(r.hash_ids[:2], rng.random() < share)]


def window(requests: Sequence[TraceRequest], max_tokens: int, count: int) -> list[TraceRequest]:
    """The first ``count`` requests whose prompt and reply fit into ``max_tokens``."""
    fitting = (r for r in requests if r.input_length + r.output_length <= max_tokens)
    return [request for request, _ in zip(fitting, range(count), strict=False)]


class Tokens:
    """Seeded token ids of blocks and replies.

    Args:
        vocab_size: ids are drawn evenly from ``first_id .. vocab_size - 1``.
        first_id: leaves special tokens out.
        seed: another seed, other tokens.
    """

    def __init__(self, vocab_size: int, *, first_id: int = 0, seed: int = 0) -> None:
        self._first = first_id
        self._count = vocab_size - first_id
        self._seed = seed

    def prompt(self, request: TraceRequest) -> np.ndarray:
        """int64 ``[input_length]``."""
        offsets = np.arange(request.block_tokens, dtype=np.uint64)
        blocks = np.array(request.hash_ids, dtype=np.uint64)[:, None] << np.uint64(20)
        return self._draw((blocks | offsets).ravel()[: request.input_length], stream=0)

    def reply(self, number: int, length: int) -> np.ndarray:
        """int64 ``[length]``: what request ``number`` is answered; shared with nobody."""
        place = np.uint64(number << 20) | np.arange(length, dtype=np.uint64)
        return self._draw(place, stream=1)

    def _draw(self, places: np.ndarray, stream: int) -> np.ndarray:
        """splitmix64 of the place."""
        x = places + np.uint64((2 * self._seed + stream) << 52)
        with np.errstate(over="ignore"):
            x = x + np.uint64(0x9E3779B97F4A7C15)
            x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            x = x ^ (x >> np.uint64(31))
        return (x % np.uint64(self._count)).astype(np.int64) + self._first
