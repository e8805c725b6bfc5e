"""Long mixed traffic with a strict account of every page.

Requests share prefixes, come in chunks, join and leave at random, and a part of them is cancelled.
Pages that belong to nobody are full of NaN; whatever is written outside the pages that were handed
out shows, and so does whatever is read there.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bicl.frontends.tgi.selftest.bench import Bench
    from bicl.frontends.tgi.selftest.router import Sequence

__all__ = ["Soak", "Traffic"]

CANCELLED = 0.15  # of the requests, some time after their prefill
PREFIXES = 5
SWEEP = 40  # requests between two looks at the free pages


@dataclass
class Traffic:
    """What happened. ``asdict`` of it goes into result files.

    Attributes:
        requests, cancelled: sent, and dropped before their end.
        hit_tokens: found in shared pages.
        chunked: requests whose prompt came in several pieces.
        steps, tokens: calls to the shard; tokens that came back.
        drafts: tokens that came beyond one a step: accepted speculation; ``refused``: drafts that
            were written into the pages and not taken.
        most_rows: of a decode batch.
        pages: in play; ``page_lives``: times that one was handed out.
        compared, near_ties: requests run again alone; those that part at a near tie, the widest
            of which is ``widest_tie`` in log-probability.
    """

    requests: int = 0
    cancelled: int = 0
    hit_tokens: int = 0
    chunked: int = 0
    steps: int = 0
    tokens: int = 0
    drafts: int = 0
    refused: int = 0
    most_rows: int = 0
    pages: int = 0
    page_lives: int = 0
    compared: int = 0
    near_ties: int = 0
    widest_tie: float = 0.0


class Soak:
    """Drives a bench.

    Args:
        requests: how many to send.
        rows: at most this many at once.
        tail: tokens of a prompt beyond its shared prefix, at most.
        new_tokens: of a request, at most.
        compare: how many requests to run again, alone.
    """

    def __init__(
        self,
        bench: Bench,
        *,
        requests: int,
        rows: int = 8,
        tail: int = 90,
        new_tokens: int = 8,
        compare: int = 10,
        seed: int = 23,
    ) -> None:
        self.bench, self.router = bench, bench.router
        self.rows, self.tail, self.new_tokens, self.compare = rows, tail, new_tokens, compare
        self.total = requests
        self.choose = random.Random(seed)
        self.auditor = bench.shards.auditor()
        self.traffic = Traffic()
        self.clean: set[int] = set()  # free, and full of NaN when last looked at
        self.kept: list[Sequence] = []
        self.prefixes: list[Sequence] = []

    def run(self) -> dict[str, Any]:
        """Raises AssertionError at the first page or token that is not as it must be."""
        try:
            return self._run()
        finally:
            self.auditor.close()

    def _run(self) -> dict[str, Any]:
        longest = (3 * self.router.page_size + self.tail + self.new_tokens) // self.router.page_size
        aside = self.router.take_pages((self.rows + 2) * (longest + 1))
        everything = set(self.router.free_pages)
        self.traffic.pages = len(everything)
        self.auditor.poison([*everything, *aside])
        self.clean = set(everything)
        self._compute_prefixes()
        shared = [page for each in self.prefixes for page in each.pages]
        before = self.auditor.digests(shared)
        while self.traffic.requests < self.total or self.router.running:
            self._step()
        self._sweep()
        assert self.auditor.digests(shared) == before, "a shared page was altered"
        for sequence in self.prefixes:
            self.router.release(sequence)
        assert set(self.router.free_pages) == everything, "pages are lost"
        self.router.give_pages(aside)
        assert not self.auditor.written(aside), "pages that nobody had were written"
        differences = self._check_differences()
        self._compare_kept()
        return {**asdict(self.traffic), "differences": differences}

    def _compute_prefixes(self) -> None:
        """Whole pages that later requests start with."""
        for number in range(PREFIXES if self.bench.prefixes else 0):
            size = self.router.page_size * (1 + number % 3)
            first = self._sequence(self.bench.prompt(size, 500 + number), [], 1)
            self.router.prefill(first)
            self.router.finish()
            self.router.release(first, keep=size // self.router.page_size)
            first.pages = first.pages[: size // self.router.page_size]
            self.prefixes.append(first)

    def _step(self) -> None:
        room = self.rows - len(self.router.running)
        if self.traffic.requests < self.total and room > 0 and self.choose.random() < 0.7:
            self._send()
        elif self.router.running:
            self.router.decode()
        self.traffic.steps += 1
        self.traffic.most_rows = max(self.traffic.most_rows, len(self.router.running))
        self._retire()
        running = list(self.router.running.values())
        if running and self.choose.random() < CANCELLED:
            victim = self.choose.choice(running)
            self.router.cancel(victim)
            self.kept.remove(victim)
            self.router.release(victim, keep=victim.num_shared)
            self.traffic.cancelled += 1

    def _send(self) -> None:
        number = self.traffic.requests
        tail = self.bench.prompt(self.choose.randrange(1, self.tail), 1000 + number)
        prompt, pages = tail, []
        if self.prefixes and self.choose.random() < 0.6:
            prefix = self.choose.choice(self.prefixes)
            prompt, pages = prefix.prompt + tail, prefix.pages
        cached = len(prompt) - len(tail)
        sequence = self._sequence(prompt, pages, self.choose.randrange(1, self.new_tokens + 1))
        chunk = None
        if self.router.chunks and self.choose.random() < 0.4:
            chunk = self.choose.randrange(1, len(tail) + 1)
            self.traffic.chunked += chunk < len(tail)
        self.traffic.requests += 1
        self.traffic.hit_tokens += cached
        self.router.prefill(sequence, cached=cached, chunk=chunk)
        self.kept.append(sequence)
        if self.traffic.requests % SWEEP == 0:
            self._sweep()

    def _sequence(self, prompt: list[int], shared: list[int], new_tokens: int) -> Sequence:
        sequence = self.router.sequence(prompt, new_tokens, shared)
        sequence.num_shared = len(shared)
        fresh = sequence.pages[len(shared) :]
        self.clean -= set(fresh)
        self.traffic.page_lives += len(fresh)
        return sequence

    def _retire(self) -> None:
        """Pages of requests that have ended go back at once."""
        for sequence in [each for each in self.kept if each.finished and each.pages]:
            assert len(sequence.tokens) == sequence.max_new_tokens
            assert all(value == value for value in sequence.logprobs), "NaN came out"
            self.traffic.tokens += len(sequence.tokens)
            drafts = len(sequence.tokens) - sequence.answers
            self.traffic.drafts += drafts
            self.traffic.refused += (sequence.answers - 1) * self.router.speculate - drafts
            self.router.release(sequence, keep=sequence.num_shared)
            sequence.pages = []

    def _sweep(self) -> None:
        """Free pages must be as they were left; what came back since is filled with NaN."""
        dirty = self.auditor.written(self.clean)
        assert not dirty, f"free pages were written: {sorted(dirty)}"
        self.clean = set(self.router.free_pages)
        self.auditor.poison(self.clean)

    def _compare_kept(self) -> None:
        count = min(self.compare, len(self.kept))
        for sequence in self.choose.sample(self.kept, count):
            tie = self.bench.compare(sequence)
            self.traffic.near_ties += tie > 0
            self.traffic.widest_tie = max(self.traffic.widest_tie, tie)
            self.traffic.compared += 1

    def _check_differences(self) -> list[dict[str, Any]]:
        """Attention inside the shard: at most twice as far from float32 as PyTorch's own."""
        found = self.auditor.differences()
        for each in found:
            assert not each.not_finite
            assert each.worst <= 2 * each.torch_worst + 1e-5, each
        return [asdict(each) for each in found]
