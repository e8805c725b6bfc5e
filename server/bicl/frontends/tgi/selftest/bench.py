"""What a case of the self-test is given: a running shard, its router, and what must come out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # names of cases are listed where TGI is not installed, too
    from bicl.frontends.tgi.selftest.models import Model
    from bicl.frontends.tgi.selftest.router import Router, Sequence
    from bicl.frontends.tgi.selftest.shard import Shards

__all__ = ["NEAR_TOKENS", "PREFILL_TOKENS", "TOTAL_TOKENS", "Bench"]

PREFILL_TOKENS = 256  # of a step, that the shard is warmed up with
TOTAL_TOKENS = 1280  # of a request
MOST_BEHIND = 1.0  # in log-probability, of a near tie in half precision
NEAR_TOKENS = 5  # how many of the likeliest tokens are looked at for a near tie


@dataclass
class Bench:
    """A running shard behind its router, and what its tokens are compared with.

    Attributes:
        num_tokens: what the shard's warm-up answered.
        free_bytes: memory that the shard was told to have.
        kv_bytes: bytes of a stored element.
        exact: tokens equal plain transformers; else (lossy caches) those of the same prompt alone
            and in one piece.
        lossy: attention reads less than was stored, or something else: what it gives is not
            compared with float32.
        half: the shard computes in half precision, which rounds differently from batch to batch:
            the first different token may be less likely than the best one, by the run that it is
            compared with, by twice what bf16 does to plain transformers there, and by 1 at most
            (random tokens are 6 to 20 behind). After it the two go their own ways.
        tie: the same as a number, in log-probability, for models without transformers beside them.
        new_tokens: of a request, where a case says nothing else.
        prefixes: requests may share pages.
        alone: where the same prompt is run alone; by default here.
        restart: stops the shards and starts new ones; sets ``shards`` and ``router``.
    """

    shards: Shards
    router: Router
    model: Model
    num_tokens: int
    free_bytes: int
    kv_bytes: int = 4
    exact: bool = True
    lossy: bool = False
    half: bool = False
    tie: float = 0.0
    new_tokens: int = 12
    prefixes: bool = True
    alone: Router | None = None
    restart: Callable[[], None] = lambda: None

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        return self.model.prompt(length, f"{length}/{seed}")

    def sequence(
        self, prompt: list[int], shared: list[int] | None = None, new_tokens: int | None = None
    ) -> Sequence:
        return self.router.sequence(prompt, new_tokens or self.new_tokens, shared)

    def check(self, *sequences: Sequence) -> None:
        """Finish what runs, then compare every token."""
        self.router.finish()
        for sequence in sequences:
            self.compare(sequence)
            self.router.release(sequence)

    def expect_held(
        self, sequence: Sequence, held: int, cached: int = 0, chunk: int | None = None
    ) -> None:
        """Prefill, and look how many prompt tokens the shard did not compute."""
        auditor = self.shards.auditor()
        while not all(auditor.settled()):
            time.sleep(0.01)
        self.router.prefill(sequence, cached=cached, chunk=chunk)
        found = auditor.cached_tokens(sequence.id)
        auditor.close()
        assert set(found) == {held}, f"{found} tokens of {len(sequence.prompt)} were held"

    def compare(self, sequence: Sequence) -> float:
        """Compare a finished request's tokens; how near the tie was at which they part, 0 if they
        do not."""
        expected, tops = self._expected(sequence)
        if sequence.tokens == expected:
            return 0.0
        pairs = zip(sequence.tokens, expected, strict=True)
        first = next(i for i, (got, wanted) in enumerate(pairs) if got != wanted)
        behind = math.inf
        if tops:
            best = tops[first]
            behind = max(best.values()) - best.get(sequence.tokens[first], -math.inf)
        bound = self.tie
        if self.half:
            rounding = self.model.rounding(sequence.prompt, expected, sequence.adapter)
            bound = min(2 * rounding, MOST_BEHIND)
        assert behind <= bound, (
            f"prompt of {len(sequence.prompt)} tokens: got {sequence.tokens}, expected {expected}"
            f"; token {first} is {behind:.3f} less likely than the best one, bound {bound:.3f}"
        )
        return behind

    def _expected(self, sequence: Sequence) -> tuple[list[int], list[dict[int, float]]]:
        """Tokens, and the likeliest ones at each step if near ties are allowed."""
        if self.exact:
            count = sequence.max_new_tokens
            return self.model.greedy_with_tops(sequence.prompt, count, sequence.adapter)
        router = self.alone or self.router
        alone = router.sequence(sequence.prompt, sequence.max_new_tokens)
        alone.adapter = sequence.adapter
        alone.top = NEAR_TOKENS if self.tie or self.half else 0
        router.prefill(alone)
        router.finish()
        router.release(alone)
        return alone.tokens, alone.tops
