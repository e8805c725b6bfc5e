"""The cache manager against a naive model, in pools so small that eviction never stops.

Page contents are simulated. What K and V at a position are is decided by the namespace, the
weights and all tokens up to there, so a slot holds a digest of exactly these. A reader of a stale
page, of one that was handed to two sequences, or of a wrong copy then sees a wrong digest.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import pytest
from bicl.cache.keys import Namespace
from bicl.cache.manager import CacheManager
from bicl.cache.sequence import SequencePages
from bicl.errors import CapacityError, InvalidInputError
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

PAGE = 4
NAMESPACES = [
    Namespace(),
    Namespace("tenant"),
    Namespace("", "lora"),
    Namespace("tenant", "lora"),
]
MOSTLY = st.sampled_from([True] * 7 + [False])
TOKENS = st.integers(1, 2)
STEMS = [[1] * 24, [1] * 6 + [2] * 18, [2, 1, 1] * 8]


def prompt_of(stem: list[int], length: int, tail: list[int]) -> list[int]:
    return [*stem[:length], *tail]


# Few stems and two token ids, so that prompts share prefixes and part at every length.
PROMPTS = st.builds(
    prompt_of, st.sampled_from(STEMS), st.integers(1, 24), st.lists(TOKENS, max_size=3)
)
NAMESPACE = st.sampled_from([NAMESPACES[0]] * 5 + NAMESPACES)

Digest = bytes


def extend_chain(before: Digest, token: int, weights: int) -> Digest:
    return hashlib.blake2b(before + bytes([token, weights]), digest_size=8).digest()


@dataclass(eq=False)
class Running:
    """The model's view of a live sequence."""

    seq: SequencePages
    namespace: Namespace
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)  # committed
    digests: list[Digest] = field(default_factory=list)  # what their slots must hold
    flushed: bool = False


class ManagerMachine(RuleBasedStateMachine):
    @initialize(
        num_pages=st.sampled_from([*range(1, 13), 400, 400]),
        reserved=st.integers(0, 1),
        min_copy=st.integers(1, PAGE),
        prefix_cache=MOSTLY,
    )
    def create(
        self, num_pages: int, reserved: int, min_copy: int, prefix_cache: bool
    ) -> None:
        self.now = 0.0
        self.manager = CacheManager(
            num_pages + reserved,
            PAGE,
            reserved_pages=reserved,
            min_copy_tokens=min_copy,
            prefix_cache=prefix_cache,
            clock=lambda: self.now,
        )
        self.contents: list[list[Digest | None]] = [
            [None] * PAGE for _ in range(num_pages + reserved)
        ]
        self.weights = dict.fromkeys(("", "lora"), 0)
        self.running: list[Running] = []
        self.known: dict[Namespace, set[tuple[int, ...]]] = {
            n: set() for n in NAMESPACES
        }
        self.counters = {}

    # --- rules ---------------------------------------------------------------------------------
    @rule(
        prompt=PROMPTS,
        namespace=NAMESPACE,
        chunk=st.none() | st.integers(1, 22),
        reuse=MOSTLY,
        resumed=st.booleans(),
    )
    def acquire(self, prompt, namespace, chunk, reuse, resumed) -> None:
        manager, before = self.manager, self.manager.gauges()
        room = min(chunk or len(prompt), len(prompt))
        looked_up = manager.cached_tokens(prompt, namespace)
        try:
            seq = manager.acquire(
                prompt, namespace, num_tokens=chunk, reuse=reuse, resumed=resumed
            )
        except CapacityError:
            total = manager.pages_for(len(prompt))
            assert (
                total > manager.usable_pages - before.pinned_pages - before.in_use_pages
            )
            assert manager.gauges() == before
            return
        if seq is None:  # really no room, and nothing happened
            assert manager.pages_for(room) > before.free_pages + before.cached_pages
            assert manager.gauges() == before
            return
        self.check_hit(seq, prompt, namespace, reuse, looked_up)
        assert seq.capacity_tokens >= max(room, seq.num_cached_tokens)
        shared = seq.num_cached_tokens // PAGE
        self.poison(seq.page_ids[shared:])
        self.running.append(self.started(seq, namespace, prompt))

    def check_hit(self, seq, prompt, namespace, reuse, looked_up) -> None:
        manager, cached = self.manager, seq.num_cached_tokens
        assert cached < len(prompt)  # A6
        expected = self.expected_hit(tuple(prompt), namespace)
        if not (reuse and manager.prefix_cache):
            assert cached == 0
            assert seq.pending_copies == ()
            return
        assert cached <= expected
        assert cached in (
            looked_up,
            looked_up // PAGE * PAGE,
        )  # less only where a copy had no room
        if manager.stats.evicted_pages == 0 and len(self.contents) > 100:
            assert cached == expected

    def expected_hit(self, prompt: tuple[int, ...], namespace: Namespace) -> int:
        """The longest reusable prefix by brute force over everything ever kept."""
        limit = len(prompt) - 1
        whole, best = 0, 0
        for kept in self.known[namespace]:
            common = 0
            while common < min(limit, len(kept)) and kept[common] == prompt[common]:
                common += 1
            best = max(best, common)
            whole = max(whole, common // PAGE * PAGE)
        gain = best - whole
        return best if gain >= self.manager.min_copy_tokens else whole

    def started(self, seq, namespace, prompt) -> Running:
        weights = self.weights[namespace.adapter_id]
        digest, digests = repr(namespace).encode(), []
        for token in prompt[: seq.num_cached_tokens]:
            digest = extend_chain(digest, token, weights)
            digests.append(digest)
        tokens = prompt[: seq.num_cached_tokens]
        return Running(seq, namespace, prompt, tokens, digests)

    def poison(self, pages: list[int]) -> None:
        for page in pages:
            self.contents[page] = [None] * PAGE

    @rule(
        prompt=PROMPTS,
        namespace=NAMESPACE,
        new=st.lists(TOKENS, max_size=6),
        keep=MOSTLY,
    )
    def serve_whole_request(self, prompt, namespace, new, keep) -> None:
        self.acquire(prompt, namespace, None, True, False)
        if not self.running or self.running[-1].prompt is not prompt:
            return
        run = self.running[-1]
        self.issue_copies_of(run)
        self.step(run, len(prompt), [])
        for token in new:
            if not self.grow(run, len(run.tokens) + 1):
                break
            self.step(run, 1, [token])
        self.release_run(run, keep)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def issue_copies(self, data) -> None:
        self.issue_copies_of(data.draw(st.sampled_from(self.running)))

    def issue_copies_of(self, run: Running) -> None:
        for copy in run.seq.pending_copies:
            self.contents[copy.target] = list(self.contents[copy.source])
        self.manager.copies_issued(run.seq)
        assert run.seq.pending_copies == ()

    @precondition(lambda self: self.running)
    @rule(data=st.data(), more=st.integers(-3, 12))
    def extend(self, data, more) -> None:
        run = data.draw(st.sampled_from(self.running))
        self.grow(run, max(run.seq.num_committed_tokens + more, 0))

    def grow(self, run: Running, wanted: int) -> bool:
        held, before = list(run.seq.page_ids), self.manager.gauges()
        missing = self.manager.pages_for(wanted) - len(held)
        try:
            extended = self.manager.extend(run.seq, wanted)
        except CapacityError:
            assert missing > before.free_pages + before.cached_pages
            extended = False
        assert extended == (
            missing <= before.free_pages + before.cached_pages or missing <= 0
        )
        if not extended:  # A29
            assert run.seq.page_ids == held
            assert self.manager.gauges() == before
            return False
        assert run.seq.page_ids[: len(held)] == held
        assert run.seq.capacity_tokens >= wanted
        self.poison(run.seq.page_ids[len(held) :])
        return True

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 24), rejected=st.integers(0, 2))
    def compute(self, data, count, rejected) -> None:
        """A step: tokens are written and committed; some more are written and given up (A63)."""
        run = data.draw(st.sampled_from(self.running))
        if run.seq.pending_copies:
            with pytest.raises(InvalidInputError, match="copies"):
                self.manager.commit(run.seq, [])
            return
        self.step(run, count, data.draw(st.lists(TOKENS, max_size=6)))
        room = run.seq.capacity_tokens - len(run.tokens)
        for position in range(len(run.tokens), len(run.tokens) + min(rejected, room)):
            self.contents[run.seq.page_ids[position // PAGE]][position % PAGE] = (
                b"rejected"
            )

    def step(self, run: Running, count: int, new: list[int]) -> None:
        """Compute up to ``count`` tokens: the rest of the prompt, then new ones."""
        room = run.seq.capacity_tokens - len(run.tokens)
        tokens = [*run.prompt[len(run.tokens) :], *new][: min(count, room)]
        for token in tokens:
            self.write(run, token)
        self.manager.commit(run.seq, tokens)
        assert run.seq.num_committed_tokens == len(run.tokens)
        self.note_full_pages(run)

    def write(self, run: Running, token: int) -> None:
        before = run.digests[-1] if run.digests else repr(run.namespace).encode()
        run.digests.append(
            extend_chain(before, token, self.weights[run.namespace.adapter_id])
        )
        position = len(run.tokens)
        run.tokens.append(token)
        self.contents[run.seq.page_ids[position // PAGE]][position % PAGE] = (
            run.digests[-1]
        )

    def note_full_pages(self, run: Running) -> None:
        if self.manager.prefix_cache and not run.flushed:
            self.known[run.namespace].add(
                tuple(run.tokens[: len(run.tokens) // PAGE * PAGE])
            )

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def refuse_to_commit_beyond_the_pages(self, data) -> None:
        run = data.draw(st.sampled_from(self.running))
        too_many = [1] * (run.seq.capacity_tokens - len(run.tokens) + 1)
        with pytest.raises(InvalidInputError, match="room for"):
            self.manager.commit(run.seq, too_many)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), keep=MOSTLY)
    def release(self, data, keep) -> None:
        self.release_run(data.draw(st.sampled_from(self.running)), keep)

    def release_run(self, run: Running, keep: bool) -> None:
        copied = not run.seq.pending_copies
        self.manager.release(run.seq, keep=keep)
        self.running.remove(run)
        kept_tail = len(run.tokens) % PAGE >= self.manager.min_copy_tokens
        if (
            keep
            and copied
            and kept_tail
            and self.manager.prefix_cache
            and not run.flushed
        ):
            self.known[run.namespace].add(tuple(run.tokens))
        with pytest.raises(InvalidInputError, match="not live"):
            self.manager.release(run.seq)

    @rule(prompt=PROMPTS, namespace=NAMESPACE, ttl=st.none() | st.integers(1, 5))
    def pin(self, prompt, namespace, ttl) -> None:
        before = self.manager.gauges()
        try:
            pinned = self.manager.pin(prompt, namespace, ttl)
        except CapacityError:
            assert self.manager.gauges() == before
            return
        assert pinned % PAGE == 0
        assert pinned <= len(prompt)
        protected = before.cached_pages - self.manager.gauges().cached_pages
        assert 0 <= protected <= pinned // PAGE
        if pinned:
            assert self.manager.cached_tokens([*prompt, 1], namespace) >= pinned

    @rule(prompt=PROMPTS, namespace=NAMESPACE)
    def unpin(self, prompt, namespace) -> None:
        self.manager.unpin(prompt, namespace)

    @rule(seconds=st.integers(1, 3))
    def wait(self, seconds) -> None:
        self.now += seconds

    @rule(adapter_id=st.sampled_from([None, "", "lora", "lora", "lora"]))
    def change_weights(self, adapter_id) -> None:  # A12, A18
        before = self.manager.gauges()
        report = self.manager.flush(adapter_id)
        freed = self.manager.gauges().free_pages - before.free_pages
        assert report.freed_pages == freed
        for adapter in self.weights:
            if adapter_id in (None, adapter):
                self.weights[adapter] += 1
        for namespace, known in self.known.items():
            if adapter_id in (None, namespace.adapter_id):
                known.clear()
        for run in self.running:
            run.flushed |= adapter_id in (None, run.namespace.adapter_id)
        if adapter_id is None:
            assert self.manager.gauges().cached_pages == 0
            assert self.manager.gauges().pinned_pages == 0

    # --- what must always hold -----------------------------------------------------------------
    @invariant()
    def accounting_holds(self) -> None:  # A22, A23
        self.manager.check_integrity()
        gauges = self.manager.gauges()
        assert gauges.total_pages == len(self.contents)
        assert min(gauges.free_pages, gauges.cached_pages, gauges.in_use_pages) >= 0

    @invariant()
    def every_sequence_reads_what_was_computed_for_it(self) -> None:  # A19
        for run in self.running:
            copied = sum(copy.num_tokens for copy in run.seq.pending_copies)
            for position in range(len(run.tokens) - copied):
                page = run.seq.page_ids[position // PAGE]
                assert self.contents[page][position % PAGE] == run.digests[position]
            for copy in run.seq.pending_copies:
                start = len(run.tokens) - copied
                wanted = run.digests[start : start + copy.num_tokens]
                assert self.contents[copy.source][: copy.num_tokens] == wanted
                assert copy.target == run.seq.page_ids[start // PAGE]

    @invariant()
    def counters_only_grow(self) -> None:
        stats = self.manager.stats
        counters = {name: getattr(stats, name) for name in stats.__slots__}
        assert all(counters[name] >= value for name, value in self.counters.items())
        assert stats.hit_tokens <= stats.queried_tokens
        self.counters = counters

    def teardown(self) -> None:  # A25
        if not hasattr(self, "manager"):
            return
        for run in self.running:
            self.manager.release(run.seq)
        self.manager.flush()
        self.manager.check_integrity()
        assert self.manager.gauges().free_pages == self.manager.usable_pages


def test_manager_agrees_with_a_naive_model() -> None:
    run_state_machine_as_test(
        ManagerMachine,
        settings=settings(
            max_examples=250,
            stateful_step_count=50,
            deadline=None,
            report_multiple_bugs=False,
        ),
    )
