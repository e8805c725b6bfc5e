"""An engine to break, and the truth to hold it against."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bicl.cache.tiers import PageTiers, TierStats
from bicl.errors import BiclError
from bicl.frontends.http.chaos.model import FIRST_ID, VOCAB_SIZE
from bicl.frontends.http.engine import Engine, EngineConfig, RequestStream
from bicl.frontends.http.loader import LoadedModel
from bicl.frontends.http.request import (
    GenerationParams,
    GenerationRequest,
    RequestDone,
    RequestFailed,
    TokenEvent,
    Usage,
)

__all__ = ["Answer", "ChaosError", "Lab", "Rig", "Truth", "require"]

PAGE_SIZE = 32
NEW_TOKENS = 6
PATIENCE_SECONDS = 60.0
TOLERANCE = 0.15
"""Nats. Between bfloat16 and float32 the tiny model's tokens differ by 0.02 (median) to 0.07."""

TOP_TOKENS = 4
_numbers = itertools.count()


class ChaosError(BiclError, AssertionError):
    """The oracle was contradicted."""


def require(condition: object, what: str) -> None:
    """Raise :class:`ChaosError` unless ``condition`` holds."""
    if not condition:
        raise ChaosError(what)


Likely = dict[int, float]
"""The likeliest tokens of a step, and their log-probabilities."""


@dataclass(frozen=True)
class Answer:
    """What a request came to: its tokens, what was likely in each step and its usage, or the error
    it ended with."""

    ids: list[int]
    likely: list[Likely]
    usage: Usage | None
    error: Exception | None
    seconds: float


@dataclass(frozen=True)
class Truth:
    """What a cold run answered.

    Attributes:
        tolerance: of log-probabilities, in nats. 0: the same tokens in every case. Else those of
            the likeliest tokens of each step may differ by so much (sums in bfloat16 depend on
            where a prompt was cut), and tokens as likely as each other may change places; what
            follows such a change has another past and is not compared.
    """

    ids: list[int]
    likely: list[Likely]
    tolerance: float = 0.0

    def agrees(self, ids: Sequence[int], likely: Sequence[Likely]) -> bool:
        """Whether ``ids`` may be the beginning of this answer."""
        if len(ids) > len(self.ids):
            return False
        if not self.tolerance:
            return list(ids) == self.ids[: len(ids)]
        for token, there, true_token, true in zip(ids, likely, self.ids, self.likely, strict=False):
            if not (_are_near(there, true, self.tolerance)):
                return False
            if token != true_token:
                return true.get(token, -math.inf) >= max(true.values()) - self.tolerance
        return True


def _are_near(left: Likely, right: Likely, tolerance: float) -> bool:
    """Tokens that only one side names may be as likely there as the least of the other side."""
    least_left, least_right = min(left.values()), min(right.values())
    return all(
        abs(left[token] - right[token]) <= tolerance
        if token in left and token in right
        else left.get(token, least_left) <= least_right + tolerance
        if token in left
        else right[token] <= least_left + tolerance
        for token in left.keys() | right.keys()
    )


class Lab:
    """A model, the truth about it, and a folder; makes rigs.

    Args:
        loaded: the model.
        folder: for disk tiers.
        seed: of prompts and of whatever is left to chance.
    """

    def __init__(self, loaded: LoadedModel, folder: Path, seed: int = 0) -> None:
        self.loaded = loaded
        self.folder = folder
        self.rng = random.Random(seed)
        self._truth: dict[tuple[str, tuple[int, ...], int], Truth] = {}
        self._oracle: Engine | None = None

    def prompt(self, length: int, stem: Sequence[int] = ()) -> tuple[int, ...]:
        """``stem``, and random tokens up to ``length``."""
        rest = (self.rng.randrange(FIRST_ID, VOCAB_SIZE) for _ in range(length - len(stem)))
        return (*stem, *rest)

    def truth(self, prompt: Sequence[int], new_tokens: int = NEW_TOKENS) -> Truth:
        """What a cold run answers: alone, in an engine that reuses nothing."""
        key = (self.loaded.sha, tuple(prompt), new_tokens)
        if key not in self._truth:
            if self._oracle is None or self._oracle.loaded is not self.loaded:
                self.close()
                config = EngineConfig(page_size=PAGE_SIZE, prefix_caching=False, num_threads=1)
                self._oracle = Engine(self.loaded, config).start()
            answer = collect(submit(self._oracle, prompt, new_tokens))
            require(answer.error is None, f"the cold run failed: {answer.error}")
            exact = self.loaded.dtype == torch.float32
            self._truth[key] = Truth(answer.ids, answer.likely, 0.0 if exact else TOLERANCE)
        return self._truth[key]

    def other_weights(self, loaded: LoadedModel) -> None:
        """From now on rigs and the truth are another model's."""
        self.loaded = loaded

    def forget_truth(self) -> None:
        """The model's weights were changed in place."""
        self._truth.clear()

    @contextmanager
    def rig(self, **config: Any) -> Iterator[Rig]:
        """A running engine with a host tier; the oracle is asked once more at the end."""
        rig = Rig(self, config)
        try:
            yield rig
            rig.check()
        finally:
            rig.engine.stop()

    def close(self) -> None:
        if self._oracle is not None:
            self._oracle.stop()
            self._oracle = None


class Rig:
    """One engine under test. Faults are put into its parts by :mod:`.faults`."""

    def __init__(self, lab: Lab, config: dict[str, Any]) -> None:
        self.lab = lab
        options = {
            "max_total_tokens": 512,
            "max_batch_prefill_tokens": 96,
            "max_batch_size": 4,
            "page_size": PAGE_SIZE,
            "num_pages": 64,
            "host_cache_bytes": 32 << 20,
            "num_threads": 1,
        }
        self.engine = Engine(lab.loaded, EngineConfig(**options | config))
        self._poison()
        self.engine.start()
        if self.engine._tiers is not None:
            self._always_fetch(self.engine._tiers)

    # --- what the cases do -------------------------------------------------------------------
    def submit(
        self, prompt: Sequence[int], new_tokens: int = NEW_TOKENS, **whose: str
    ) -> RequestStream:
        return submit(self.engine, prompt, new_tokens, **whose)

    def ask(self, prompt: Sequence[int], new_tokens: int = NEW_TOKENS, **whose: str) -> Answer:
        """Send a request, wait, and hold its tokens against the truth."""
        return self.expect(self.submit(prompt, new_tokens, **whose), prompt, new_tokens)

    def expect(
        self, stream: RequestStream, prompt: Sequence[int], new_tokens: int = NEW_TOKENS
    ) -> Answer:
        """Wait for an answer and hold its tokens against the truth."""
        answer = collect(stream)
        if answer.error is not None:
            raise ChaosError(f"a request failed: {answer.error!r}") from answer.error
        truth = self.lab.truth(prompt, new_tokens)
        require(
            len(answer.ids) == new_tokens and truth.agrees(answer.ids, answer.likely),
            f"a prompt of {len(prompt)} tokens was answered {answer}, cold {truth}",
        )
        return answer

    def forget_nothing(self) -> None:
        """Beside the two that follow, for cases that go through all tiers."""

    def forget_pool(self) -> None:
        """All leaves the pool, as under pressure; the tiers keep what they have."""
        require(self.tiers.settle(PATIENCE_SECONDS), "the tiers did not come to rest")
        manager = self.engine._scheduler.manager
        with self.engine._lock, torch.inference_mode():
            seq = manager.acquire([FIRST_ID] * manager.max_tokens, reuse=False)
            require(seq is not None, "the pool is not idle")
            assert seq is not None
            manager.release(seq, keep=False)

    def forget_host(self) -> None:
        """All leaves pool and host memory; the disk keeps what it has."""
        self.forget_pool()
        tiers = self.tiers
        with tiers._changed:
            tiers._host.flush(None)

    @property
    def tiers(self) -> PageTiers:
        tiers = self.engine._tiers
        assert tiers is not None, "this rig has no tiers"
        return tiers

    def tier_stats(self) -> TierStats:
        stats = self.tiers.stats()
        return replace(stats, failures=stats.failures.copy())

    def wait_until(self, condition: Any, what: str) -> None:
        """Poll for something that another thread brings about."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            require(time.monotonic() < deadline, f"waited in vain until {what}")
            time.sleep(0.002)

    def check(self) -> None:
        """Every page and slot is accounted for, and nothing is held by nobody."""
        engine = self.engine
        self.wait_until(lambda: not engine._live, "every request has ended")
        if engine._tiers is not None:
            require(engine._tiers.settle(PATIENCE_SECONDS), "the tiers did not come to rest")
            require(engine._tiers.check_integrity(), "slots of the host tier are lost")
        engine.check_integrity()
        stats = engine.snapshot()
        held = {
            "in use": stats.pages_in_use,
            "loading": stats.pages_loading,
            "batch": stats.batch_size,
            "queue": stats.queue_size,
        }
        require(not any(held.values()), f"idle, but {held}")
        require(stats.healthy, "the engine's thread has died")

    # --- inside ------------------------------------------------------------------------------
    def _poison(self) -> None:
        """NaN in every page of the pool now and whenever pages are handed out, and in host slots
        (all bits set are a NaN in every floating-point type)."""
        layers = self.engine._runner.pool.layers
        manager = self.engine._scheduler.manager
        allocate = manager._allocate

        def poisoned(num_pages: int) -> list[int] | None:
            pages = allocate(num_pages)
            if pages:
                for layer in layers:
                    layer.pages[pages] = math.nan
            return pages

        manager._allocate = poisoned  # type: ignore[method-assign]
        for layer in layers:
            layer.pages.fill_(math.nan)
        if self.engine._tiers is None:
            return
        host = self.engine._tiers._host
        take_slot = host.take_slot

        def poisoned_slot() -> int | None:
            slot = take_slot()
            if slot is not None:
                host.arena.slot(slot).fill_(0xFF)
            return slot

        host.take_slot = poisoned_slot  # type: ignore[method-assign]
        for slot in range(host.arena.num_slots):
            host.arena.slot(slot).fill_(0xFF)

    @staticmethod
    def _always_fetch(tiers: PageTiers) -> None:
        """A model this small is computed sooner than anything is copied; fetch all the same."""
        tiers.costs.prefill_tokens_per_second = 0.0
        tiers.costs.disk_bytes_per_second = tiers.costs.cached_bytes_per_second = 0.0


def submit(engine: Engine, prompt: Sequence[int], new_tokens: int, **whose: str) -> RequestStream:
    params = GenerationParams(new_tokens, ignore_eos=True, top_n_tokens=TOP_TOKENS)
    name = f"chaos-{next(_numbers)}"
    return engine.submit(GenerationRequest(name, tuple(prompt), params, **whose))


def likely_of(event: TokenEvent) -> Likely:
    """The likeliest tokens of a step, the chosen one among them."""
    return {token.id: token.logprob for token in (*event.top_tokens, event.token)}


def collect(stream: RequestStream) -> Answer:
    """Wait for the end; every log-probability must be a number."""
    began = time.perf_counter()
    ids: list[int] = []
    likely: list[Likely] = []
    last: object = None
    for last in stream:
        if isinstance(last, TokenEvent):
            require(math.isfinite(last.token.logprob), "a log-probability is not finite")
            ids.append(last.token.id)
            likely.append(likely_of(last))
    seconds = time.perf_counter() - began
    if isinstance(last, RequestFailed):
        return Answer(ids, likely, None, last.error, seconds)
    assert isinstance(last, RequestDone)
    return Answer(ids, likely, last.usage, None, seconds)
