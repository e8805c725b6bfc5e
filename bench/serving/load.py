"""Requests for an engine, and what came of them."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.serving.random_model import FIRST_ID
from bicl.frontends.http.engine import Engine, RequestStream
from bicl.frontends.http.request import (
    GenerationParams,
    GenerationRequest,
    RequestDone,
    RequestEvent,
    RequestFailed,
)

__all__ = ["CHAT", "ChatLengths", "finish", "open_loop", "random_prompt", "submit", "timed"]

_numbers = itertools.count()


@dataclass(frozen=True)
class ChatLengths:
    """Lognormal lengths of prompts and replies, cut at ``max_prompt`` and ``max_reply``."""

    prompt_median: float
    prompt_sigma: float
    max_prompt: int
    reply_median: float
    reply_sigma: float
    max_reply: int

    def draw(self, rng: random.Random) -> tuple[int, int]:
        prompt = self.prompt_median * rng.lognormvariate(0, self.prompt_sigma)
        reply = self.reply_median * rng.lognormvariate(0, self.reply_sigma)
        return (
            min(self.max_prompt, max(1, round(prompt))),
            min(self.max_reply, max(1, round(reply))),
        )

    def shrunk(self, factor: float) -> ChatLengths:
        return ChatLengths(
            self.prompt_median / factor,
            self.prompt_sigma,
            round(self.max_prompt / factor),
            self.reply_median / factor,
            self.reply_sigma,
            round(self.max_reply / factor),
        )


CHAT = ChatLengths(1020, 0.77, 4142, 129, 0.93, 601)
"""Azure's 2023 trace of conversations: median, 90th and (as the cut) 99th percentile."""


def random_prompt(rng: np.random.Generator, length: int, vocab_size: int) -> tuple[int, ...]:
    """Tokens that no other prompt begins with."""
    return tuple(rng.integers(FIRST_ID, vocab_size, length).tolist())


def submit(
    engine: Engine, prompt: Sequence[int], new_tokens: int, *, salt: str = ""
) -> RequestStream:
    params = GenerationParams(new_tokens, ignore_eos=True)
    return engine.submit(GenerationRequest(f"b{next(_numbers)}", tuple(prompt), params, salt=salt))


def finish(stream: RequestStream) -> RequestDone:
    """Wait for the end of a request.

    Raises:
        Exception: the request failed; its own error.
    """
    return timed(stream)[1]


def timed(stream: RequestStream) -> tuple[float, RequestDone]:
    """Wait for the end of a request: ``perf_counter`` at its first event, and its last event.

    Raises:
        Exception: the request failed; its own error.
    """
    first = 0.0
    last: RequestEvent | None = None
    for event in stream:
        first = first or time.perf_counter()
        last = event
    if isinstance(last, RequestFailed):
        raise last.error
    assert isinstance(last, RequestDone)
    return first, last


def open_loop(
    engine: Engine, lengths: ChatLengths, rate: float, seconds: float, prompts: int = 0
) -> list[RequestStream]:
    """Submit requests at random times, ``rate`` a second, whatever the engine answers. Lengths and
    times are always the same; ``prompts`` numbers what is in them."""
    rng, ids = random.Random(0), np.random.default_rng([29, prompts])
    streams = []
    due = began = time.perf_counter()
    while due - began < seconds:
        time.sleep(max(0.0, due - time.perf_counter()))
        prompt, reply = lengths.draw(rng)
        streams.append(submit(engine, random_prompt(ids, prompt, engine.loaded.vocab_size), reply))
        due += rng.expovariate(rate)
    return streams
