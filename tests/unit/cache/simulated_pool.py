"""Pages with simulated contents, to see what a sequence would read.

What K and V at a position are is decided by the namespace, the weights and all tokens up to there,
so a slot holds a digest of exactly these. Who reads a stale page, one that was handed to two
sequences, or a wrong copy, sees a wrong digest.
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass, field

from bicl.cache.keys import Namespace, chain_key
from bicl.cache.manager import BASE, CacheManager
from bicl.cache.sequence import SequencePages
from bicl.cache.tiers import Done

Digest = bytes


@dataclass(eq=False)
class Run:
    """A live sequence: ``tokens`` are committed, ``digests`` is what their slots must hold."""

    seq: SequencePages
    namespace: Namespace
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    digests: list[Digest] = field(default_factory=list)
    flushed: bool = False


class SimulatedPool:
    """Drives a manager as an engine does and keeps the contents of its pages."""

    def __init__(self, manager: CacheManager) -> None:
        self.manager = manager
        self.page_size = manager.page_size
        self.runs: list[Run] = []
        self.weights: dict[str, int] = {}
        total = manager.gauges().total_pages
        self.contents: list[list[Digest | None]] = [[None] * self.page_size for _ in range(total)]

    def start(self, prompt: list[int], namespace: Namespace = BASE, **options) -> Run | None:
        seq = self.manager.acquire(prompt, namespace, **options)
        if seq is None:
            return None
        run = Run(seq, namespace, prompt)
        for token in prompt[: seq.num_cached_tokens]:
            self._follow(run, token)
        self._poison(seq.page_ids[seq.num_cached_tokens // self.page_size :])
        if seq.fetch:
            self._poison(seq.fetch.pages)
        self.runs.append(run)
        return run

    def issue_copies(self, run: Run) -> None:
        for copy in run.seq.pending_copies:
            self.contents[copy.target] = list(self.contents[copy.source])
        self.manager.copies_issued(run.seq)

    def grow(self, run: Run, num_tokens: int) -> bool:
        held = len(run.seq.page_ids)
        extended = self.manager.extend(run.seq, num_tokens)
        self._poison(run.seq.page_ids[held:])
        return extended

    def step(self, run: Run, count: int, new: list[int]) -> None:
        """Compute up to ``count`` tokens: the rest of the prompt, then ``new`` ones."""
        room = run.seq.capacity_tokens - len(run.tokens)
        tokens = [*run.prompt[len(run.tokens) :], *new][: min(count, room)]
        for token in tokens:
            position = len(run.tokens)
            self._follow(run, token)
            self._write(run, position, run.digests[-1])
        self.manager.commit(run.seq, tokens)

    def write_rejected(self, run: Run, count: int) -> None:
        """Fill slots after the committed ones, as a step does whose tokens are then given up."""
        room = run.seq.capacity_tokens - len(run.tokens)
        for position in range(len(run.tokens), len(run.tokens) + min(count, room)):
            self._write(run, position, b"rejected")

    def finish(self, run: Run, *, keep: bool = True) -> None:
        self.manager.release(run.seq, keep=keep)
        self.runs.remove(run)

    def serve(self, prompt: list[int], new: list[int], namespace: Namespace = BASE) -> int:
        """A whole request, alone; there must be room. Returns its cached tokens."""
        run = self.start(prompt, namespace)
        assert run is not None
        self.issue_copies(run)
        self.step(run, len(prompt), [])
        for token in new:
            assert self.grow(run, len(run.tokens) + 1)
            self.step(run, 1, [token])
        self.check()
        cached = run.seq.num_cached_tokens
        self.finish(run)
        return cached

    def check(self) -> None:
        """Accounting holds, and every live sequence reads what was computed for its tokens."""
        self.manager.check_integrity()
        self._check_keys()
        for run in self.runs:
            copied = sum(copy.num_tokens for copy in run.seq.pending_copies)
            start = len(run.tokens) - copied
            coming = set(run.seq.fetch.pages) if run.seq.fetch else set()
            for position in range(start):
                page, offset = divmod(position, self.page_size)
                if run.seq.page_ids[page] in coming:
                    continue
                assert self.contents[run.seq.page_ids[page]][offset] == run.digests[position]
            for copy in run.seq.pending_copies:
                assert copy.target == run.seq.page_ids[start // self.page_size]
                assert self.contents[copy.source][: copy.num_tokens] == run.digests[start:]

    def _check_keys(self) -> None:
        """Each indexed page is called by the chain of all ids up to it, however it came there."""
        index = self.manager._index
        for root in index.roots.values():
            for node in root.subtree():
                key = node.parent.keys[-1] if node.parent else node.keys[0]
                for number, name in enumerate(node.keys if node.parent else []):
                    page_ids = node.ids[number * index.page_bytes :][: index.page_bytes]
                    key = chain_key(key, bytes(page_ids), index.hash_function)
                    assert name == key

    def _follow(self, run: Run, token: int) -> None:
        before = run.digests[-1] if run.digests else repr(run.namespace).encode()
        weights = self.weights.get(run.namespace.adapter_id, 0)
        fact = before + token.to_bytes(8, "little") + bytes([weights])
        run.tokens.append(token)
        run.digests.append(hashlib.blake2b(fact, digest_size=8).digest())

    def _write(self, run: Run, position: int, digest: Digest) -> None:
        page, offset = divmod(position, self.page_size)
        self.contents[run.seq.page_ids[page]][offset] = digest

    def _poison(self, pages: list[int]) -> None:
        for page in pages:
            self.contents[page] = [None] * self.page_size


class SimulatedMover:
    """Moves simulated contents. Copies into the pool wait until the test lets them go.

    Attributes:
        gate: set while copies into the pool may go.
        entered: set when one waits there.
        broken: copies into the pool fail.
    """

    layer_bytes = (4, 4)

    def __init__(self, contents: list[list[Digest | None]]) -> None:
        self.contents = contents
        self.slots: dict[int, list[Digest | None]] = {}
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.broken = False

    def mark(self) -> None:
        return None

    def save(self, pages, arena, slots, after) -> Done:
        for page, slot in zip(pages, slots, strict=True):
            self.slots[slot] = list(self.contents[page])
        return Done()

    def load(self, layer, pages, arena, slots, after) -> Done:
        self.entered.set()
        assert self.gate.wait(30)
        if self.broken:
            raise OSError("bus error")
        if layer == len(self.layer_bytes) - 1:
            for page, slot in zip(pages, slots, strict=True):
                self.contents[page] = list(self.slots[slot])
        return Done()
