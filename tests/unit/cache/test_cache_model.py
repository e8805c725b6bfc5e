"""The cache manager against a naive model, in pools so small that eviction never stops."""

from __future__ import annotations

import pytest
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
from simulated_pool import Run, SimulatedPool

from bicl.cache.keys import Namespace
from bicl.cache.manager import CacheManager
from bicl.errors import CapacityError, InvalidInputError

PAGE = 4
NAMESPACES = [Namespace(), Namespace("tenant"), Namespace("", "lora"), Namespace("tenant", "lora")]
NAMESPACE = st.sampled_from([NAMESPACES[0]] * 5 + NAMESPACES)
MOSTLY = st.sampled_from([True] * 7 + [False])
TOKENS = st.integers(1, 2)
STEMS = [[1] * 24, [1] * 6 + [2] * 18, [2, 1, 1] * 8]
LARGE = 400  # pages: nothing is ever evicted, so that hits can be predicted exactly


def prompt_of(stem: list[int], length: int, tail: list[int]) -> list[int]:
    return [*stem[:length], *tail]


# Few stems and two token ids, so that prompts share prefixes and part at every length.
PROMPTS = st.builds(
    prompt_of, st.sampled_from(STEMS), st.integers(1, 24), st.lists(TOKENS, max_size=3)
)


class ManagerMachine(RuleBasedStateMachine):
    @initialize(
        num_pages=st.sampled_from([*range(1, 13), LARGE, LARGE]),
        reserved=st.integers(0, 1),
        min_copy=st.integers(1, PAGE),
        prefix_cache=MOSTLY,
    )
    def create(self, num_pages: int, reserved: int, min_copy: int, prefix_cache: bool) -> None:
        self.now = 0.0
        self.manager = CacheManager(
            num_pages + reserved,
            PAGE,
            reserved_pages=reserved,
            min_copy_tokens=min_copy,
            prefix_cache=prefix_cache,
            clock=lambda: self.now,
        )
        self.pool = SimulatedPool(self.manager)
        self.known: dict[Namespace, set[tuple[int, ...]]] = {n: set() for n in NAMESPACES}
        self.counters: dict[str, int] = {}

    # --- sequences -----------------------------------------------------------------------------
    @rule(
        prompt=PROMPTS,
        namespace=NAMESPACE,
        chunk=st.none() | st.integers(1, 22),
        reuse=MOSTLY,
        resumed=st.booleans(),
    )
    def acquire(self, prompt, namespace, chunk, reuse, resumed) -> None:
        self.admit(prompt, namespace, num_tokens=chunk, reuse=reuse, resumed=resumed)

    def admit(self, prompt, namespace, *, num_tokens=None, reuse=True, resumed=False) -> Run | None:
        manager, before = self.manager, self.manager.gauges()
        room = min(num_tokens or len(prompt), len(prompt))
        looked_up = manager.cached_tokens(prompt, namespace)
        try:
            run = self.pool.start(
                prompt, namespace, num_tokens=num_tokens, reuse=reuse, resumed=resumed
            )
        except CapacityError:
            others = before.pinned_pages + before.in_use_pages
            assert manager.pages_for(len(prompt)) > manager.usable_pages - others
            assert manager.gauges() == before
            return None
        if run is None:  # really no room, and nothing happened
            assert manager.pages_for(room) > before.free_pages + before.cached_pages
            assert manager.gauges() == before
            return None
        self.check_hit(run, reuse, looked_up)
        assert run.seq.capacity_tokens >= max(room, run.seq.num_cached_tokens)
        return run

    def check_hit(self, run: Run, reuse: bool, looked_up: int) -> None:
        cached = run.seq.num_cached_tokens
        assert cached < len(run.prompt)  # A6
        if not (reuse and self.manager.prefix_cache):
            assert cached == 0
            assert run.seq.pending_copies == ()
            return
        assert cached in (looked_up, looked_up // PAGE * PAGE)  # less only if a copy had no room
        expected = self.expected_hit(run)
        assert cached <= expected
        if self.manager.usable_pages == LARGE:
            assert cached == expected

    def expected_hit(self, run: Run) -> int:
        """The longest reusable prefix, by brute force over everything ever kept."""
        limit, best = len(run.prompt) - 1, 0
        for kept in self.known[run.namespace]:
            common = 0
            while common < min(limit, len(kept)) and kept[common] == run.prompt[common]:
                common += 1
            best = max(best, common)
        gain = best % PAGE
        return best if gain >= self.manager.min_copy_tokens else best - gain

    @rule(prompt=PROMPTS, namespace=NAMESPACE, new=st.lists(TOKENS, max_size=6), keep=MOSTLY)
    def serve_whole_request(self, prompt, namespace, new, keep) -> None:
        run = self.admit(prompt, namespace)
        if run is None:
            return
        self.pool.issue_copies(run)
        self.step(run, len(prompt), [])
        for token in new:
            if not self.grow(run, len(run.tokens) + 1):
                break
            self.step(run, 1, [token])
        self.finish(run, keep)

    @precondition(lambda self: self.pool.runs)
    @rule(data=st.data())
    def issue_copies(self, data) -> None:
        run = data.draw(st.sampled_from(self.pool.runs))
        self.pool.issue_copies(run)
        assert run.seq.pending_copies == ()

    @precondition(lambda self: self.pool.runs)
    @rule(data=st.data(), more=st.integers(-3, 12))
    def extend(self, data, more) -> None:
        run = data.draw(st.sampled_from(self.pool.runs))
        self.grow(run, max(len(run.tokens) + more, 0))

    def grow(self, run: Run, wanted: int) -> bool:
        held, before = list(run.seq.page_ids), self.manager.gauges()
        missing = self.manager.pages_for(wanted) - len(held)
        try:
            extended = self.pool.grow(run, wanted)
        except CapacityError:
            extended = False
        assert extended == (missing <= max(before.free_pages + before.cached_pages, 0))
        assert run.seq.page_ids[: len(held)] == held
        if extended:
            assert run.seq.capacity_tokens >= wanted
        else:  # A29
            assert len(run.seq.page_ids) == len(held)
            assert self.manager.gauges() == before
        return extended

    @precondition(lambda self: self.pool.runs)
    @rule(data=st.data(), count=st.integers(1, 24), rejected=st.integers(0, 2))
    def compute(self, data, count, rejected) -> None:
        """A step: tokens are written and committed; some more are written and given up (A63)."""
        run = data.draw(st.sampled_from(self.pool.runs))
        if run.seq.pending_copies:
            with pytest.raises(InvalidInputError, match="copies"):
                self.manager.commit(run.seq, [])
            return
        self.step(run, count, data.draw(st.lists(TOKENS, max_size=6)))
        self.pool.write_rejected(run, rejected)

    def step(self, run: Run, count: int, new: list[int]) -> None:
        self.pool.step(run, count, new)
        assert run.seq.num_committed_tokens == len(run.tokens)
        if self.manager.prefix_cache and not run.flushed:
            self.known[run.namespace].add(tuple(run.tokens[: len(run.tokens) // PAGE * PAGE]))

    @precondition(lambda self: self.pool.runs)
    @rule(data=st.data())
    def refuse_to_commit_beyond_the_pages(self, data) -> None:
        run = data.draw(st.sampled_from(self.pool.runs))
        too_many = [1] * (run.seq.capacity_tokens - len(run.tokens) + 1)
        with pytest.raises(InvalidInputError, match="room for"):
            self.manager.commit(run.seq, too_many)

    @precondition(lambda self: self.pool.runs)
    @rule(data=st.data(), keep=MOSTLY)
    def release(self, data, keep) -> None:
        self.finish(data.draw(st.sampled_from(self.pool.runs)), keep)

    def finish(self, run: Run, keep: bool) -> None:
        copied = not run.seq.pending_copies
        self.pool.finish(run, keep=keep)
        worth_it = len(run.tokens) % PAGE >= self.manager.min_copy_tokens
        if keep and copied and worth_it and self.manager.prefix_cache and not run.flushed:
            self.known[run.namespace].add(tuple(run.tokens))
        with pytest.raises(InvalidInputError, match="not live"):
            self.manager.release(run.seq)

    # --- prefixes ------------------------------------------------------------------------------
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
        assert self.manager.gauges().cached_pages >= before.cached_pages - pinned // PAGE
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
        assert report.freed_pages == self.manager.gauges().free_pages - before.free_pages
        for space in NAMESPACES:
            if adapter_id in (None, space.adapter_id):
                self.known[space].clear()
        for adapter in ["", "lora"] if adapter_id is None else [adapter_id]:
            self.pool.weights[adapter] = self.pool.weights.get(adapter, 0) + 1
        for run in self.pool.runs:
            run.flushed |= adapter_id in (None, run.namespace.adapter_id)
        if adapter_id is None:
            assert self.manager.gauges().cached_pages == 0
            assert self.manager.gauges().pinned_pages == 0

    # --- what must always hold -----------------------------------------------------------------
    @invariant()
    def every_page_is_accounted_for_and_read_rightly(self) -> None:  # A19, A22, A23
        self.pool.check()
        gauges = self.manager.gauges()
        assert gauges.total_pages == len(self.pool.contents)
        assert min(gauges.free_pages, gauges.cached_pages, gauges.in_use_pages) >= 0

    @invariant()
    def counters_only_grow(self) -> None:
        stats = self.manager.stats
        counters = {name: getattr(stats, name) for name in stats.__slots__}
        assert all(counters[name] >= value for name, value in self.counters.items())
        assert stats.copied_tokens <= stats.hit_tokens <= stats.queried_tokens
        self.counters = counters

    def teardown(self) -> None:  # A25
        if not hasattr(self, "manager"):
            return
        for run in list(self.pool.runs):
            self.pool.finish(run)
        self.manager.flush()
        self.manager.check_integrity()
        assert self.manager.gauges().free_pages == self.manager.usable_pages


def test_manager_agrees_with_a_naive_model() -> None:
    run_state_machine_as_test(
        ManagerMachine,
        settings=settings(max_examples=400, stateful_step_count=50, report_multiple_bugs=False),
    )
