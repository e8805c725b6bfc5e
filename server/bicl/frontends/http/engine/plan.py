"""What a step computes."""

from __future__ import annotations

from dataclasses import dataclass

from bicl.cache.tiers import Fetch
from bicl.frontends.http.engine.sequence import LogitsNeed, Sequence

__all__ = ["Chunk", "Plan"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens ``start .. start + count`` of a sequence, to be computed in this step."""

    sequence: Sequence
    start: int
    count: int
    logits: LogitsNeed

    @property
    def num_logits(self) -> int:
        """Rows that go through the output layer."""
        return (0, 1, self.count)[self.logits]

    @property
    def num_prompt_tokens(self) -> int:
        return max(0, min(self.start + self.count, self.sequence.num_prompt) - self.start)


@dataclass(frozen=True, slots=True)
class Plan:
    """One step.

    Attributes:
        chunks: decode rows first.
        admitted: sequences that left the queue, some of them not for the first time.
        unservable: sequences that cannot go on, with the reason; no longer known here.
    """

    chunks: list[Chunk]
    admitted: list[Sequence]
    unservable: list[tuple[Sequence, Exception]]

    @property
    def fetches(self) -> list[Fetch]:
        """Copies of pages that the step must join."""
        return [c.sequence.fetch for c in self.chunks if c.sequence.fetch is not None]
