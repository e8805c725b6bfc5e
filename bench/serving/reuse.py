"""What reuse costs where there is none, and what it saves where there is some.

* **no hits**: throughput of prompts that share nothing, with the index against without; pools are
  small enough that every page has to be evicted from the index to be used again.
* **three turns**: cached tokens of a chat's third turn, whose prompt holds the replies.
* **in flight**: requests with one long prefix that come at the same moment.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from bench.serving.load import finish, random_prompt, submit
from bench.serving.paired import median_of, orders
from bicl.frontends.http.engine import Engine, Outcome, StepKind, StepRecord

__all__ = ["in_flight_row", "no_hit_rows", "three_turns_row"]


def no_hit_rows(
    engines: Mapping[str, Engine], *, requests: int, prompt: int, reply: int, rounds: int
) -> list[dict[str, Any]]:
    """Rows for all engines but ``off``, the one without an index. They take turns; a ratio is taken
    within each round."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    watches = {name: _Steps() for name in engines}
    for number, order in zip(range(rounds + 1), orders(list(engines)), strict=False):
        for name in order:
            took = _serve_strangers(engines[name], number, requests, prompt, reply)
            if number:  # the first round fills pools and caches
                seconds[name].append(took)
            else:
                engines[name]._observer = watches[name]
    steps = {name: watch.medians() for name, watch in watches.items()}
    tokens = requests * (prompt + reply)
    rows = []
    for name in engines:
        if name == "off":
            continue
        stats = engines[name].snapshot()
        assert stats.hit_tokens == 0
        ratios = [off / on for off, on in zip(seconds["off"], seconds[name], strict=True)]
        found = median_of(ratios)
        rows.append(
            {
                "case": f"no hits, {name}",
                "value": found.value,
                "unit": "x",
                "interval": [found.low, found.high],
                "rounds": found.count,
                "tokens_per_second": round(tokens / statistics.median(seconds[name])),
                "tokens_per_second_off": round(tokens / statistics.median(seconds["off"])),
                "ms_per_step": steps[name],
                "ms_per_step_off": steps["off"],
                "shape": f"{requests} requests of {prompt}+{reply} tokens",
                "evicted_pages": stats.evicted_pages,
            }
        )
    return rows


class _Steps:
    """How long steps took, as told to an engine's observer."""

    def __init__(self) -> None:
        self._ms: dict[StepKind, list[float]] = {kind: [] for kind in StepKind}

    def on_step(self, record: StepRecord) -> None:
        self._ms[record.kind].append(1e3 * record.total_time)

    def on_admitted(self, queue_seconds: float, batch_size: int) -> None:
        pass

    def on_outcome(self, outcome: Outcome) -> None:
        pass

    def medians(self) -> dict[str, float]:
        """Milliseconds by kind of step."""
        return {kind.value: round(statistics.median(ms), 3) for kind, ms in self._ms.items()}


def _serve_strangers(engine: Engine, seed: int, requests: int, prompt: int, reply: int) -> float:
    rng = np.random.default_rng([7, seed])
    prompts = [random_prompt(rng, prompt, engine.loaded.vocab_size) for _ in range(requests)]
    began = time.perf_counter()
    streams = [submit(engine, each, reply) for each in prompts]
    for stream in streams:
        finish(stream)
    return time.perf_counter() - began


def three_turns_row(engine: Engine, *, message: int, reply: int) -> dict[str, Any]:
    """A chat whose turns are ``message`` tokens and answered with ``reply`` tokens."""
    rng = np.random.default_rng(11)
    page = engine.config.page_size
    history: tuple[int, ...] = ()
    cached, computed = [], 0
    for _ in range(3):
        history += random_prompt(rng, message, engine.loaded.vocab_size)
        done = submit(engine, history, reply)
        ids = []
        for event in done:
            if hasattr(event, "token"):
                ids.append(event.token.id)
        cached.append(event.usage.cached_tokens)
        full_pages_before = computed // page * page
        computed = len(history) + reply - 1  # the last token is never computed
        history += tuple(ids)
    return {
        "case": "three turns",
        "value": cached[-1] / full_pages_before,
        "unit": "x of the full pages of turns 1 and 2",
        "cached_tokens": cached,
        "full_page_tokens": full_pages_before,
        "shape": f"{message} tokens a message, {reply} a reply",
    }


def in_flight_row(engine: Engine, *, requests: int, prefix: int, suffix: int) -> dict[str, Any]:
    """How often the prefix is computed when all its requests are there at once."""
    rng = np.random.default_rng(13)
    size = engine.loaded.vocab_size
    shared = random_prompt(rng, prefix, size)
    prompts = [shared + random_prompt(rng, suffix, size) for _ in range(requests)]
    before = engine.snapshot()
    began = time.perf_counter()
    streams = [submit(engine, each, 4) for each in prompts]
    for stream in streams:
        finish(stream)
    seconds = time.perf_counter() - began
    computed = engine.snapshot().prefilled_tokens - before.prefilled_tokens
    return {
        "case": "in flight",
        "value": (computed - requests * suffix) / prefix,
        "unit": "times computed",
        "computed_tokens": computed,
        "seconds": round(seconds, 3),
        "shape": f"{requests} requests of {prefix}+{suffix} tokens",
    }
