"""The manager over host memory, both too small: whatever comes back is what was computed.

Copies into the pool stand still until the machine lets them go, so that requests are aborted, pages
evicted and weights changed while they are under way.
"""

from __future__ import annotations

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
from simulated_pool import Run, SimulatedMover, SimulatedPool

from bicl.cache.keys import Namespace
from bicl.cache.manager import CacheManager
from bicl.cache.tiers import PageTiers
from bicl.errors import CapacityError

PAGE = 4
NAMESPACES = [Namespace(), Namespace("tenant"), Namespace("", "lora")]
NAMESPACE = st.sampled_from([NAMESPACES[0]] * 4 + NAMESPACES)
STEMS = [[1] * 32, [1] * 6 + [2] * 26, [2, 1, 1] * 10]
PROMPTS = st.builds(
    lambda stem, length, tail: [*stem[:length], *tail],
    st.sampled_from(STEMS),
    st.integers(1, 28),
    st.lists(st.integers(1, 2), max_size=3),
)


class TieredMachine(RuleBasedStateMachine):
    @initialize(num_pages=st.integers(6, 12), slots=st.integers(2, 40))
    def create(self, num_pages: int, slots: int) -> None:
        self.mover = SimulatedMover([[None] * PAGE for _ in range(num_pages)])
        self.tiers = PageTiers(
            self.mover,
            PAGE,
            fingerprint=b"",
            host_bytes=slots * sum(self.mover.layer_bytes),
        )
        self.manager = CacheManager(num_pages, PAGE, min_copy_tokens=1, tiers=self.tiers)
        self.pool = SimulatedPool(self.manager)
        self.pool.contents = self.mover.contents
        self.saved_everything()

    def saved_everything(self) -> None:
        with self.tiers._changed:
            assert self.tiers._changed.wait_for(lambda: self.tiers._saves.idle, 30)

    # --- requests ------------------------------------------------------------------------------
    @rule(prompt=PROMPTS, namespace=NAMESPACE, early=st.booleans())
    def acquire(self, prompt, namespace, early) -> None:
        self.start(prompt, namespace, early)

    def start(self, prompt, namespace, early=False) -> Run | None:
        options = {"num_tokens": 1, "only_arriving": True} if early else {}
        try:
            run = self.pool.start(prompt, namespace, **options)
        except CapacityError:
            return None
        if run is not None:
            cached = run.seq.num_cached_tokens
            arriving = run.seq.num_host_tokens
            assert cached < len(prompt)
            if run.seq.fetch is not None:
                assert self.mover.entered.wait(30)  # from here on nothing moves by itself
            assert arriving % PAGE == 0
            assert bool(arriving) == (run.seq.fetch is not None)
            assert not (arriving and run.seq.pending_copies)
        return run

    @rule(prompt=PROMPTS, namespace=NAMESPACE, new=st.lists(st.integers(1, 2), max_size=6))
    def serve_whole_request(self, prompt, namespace, new) -> None:
        self.serve(prompt, namespace, new)

    @rule(stem=st.sampled_from(STEMS))
    def serve_a_long_prompt(self, stem) -> None:
        """It fills host memory and drives the others out of the pool."""
        self.serve(stem[:24], NAMESPACES[0], [])

    def serve(self, prompt, namespace, new) -> None:
        run = self.start(prompt, namespace)
        if run is None:
            return
        self.deliver()
        if run.seq.fetch is not None:
            self.join(run)
        self.pool.issue_copies(run)
        self.pool.step(run, len(prompt), [])
        self.saved_everything()
        for token in new:
            if not self.grow(run):
                break
            self.pool.step(run, 1, [token])
        self.pool.finish(run)
        self.saved_everything()

    def grow(self, run: Run) -> bool:
        try:
            return self.pool.grow(run, len(run.tokens) + 1)
        except CapacityError:
            return False

    @rule(stem=st.sampled_from(STEMS), length=st.integers(9, 24))
    def abort_while_its_pages_come(self, stem, length) -> None:  # A33
        run = self.start(stem[:length], NAMESPACES[0])
        if run is not None:
            before, loading = (
                self.manager.gauges(),
                len(run.seq.fetch.pages if run.seq.fetch else []),
            )
            self.pool.finish(run)
            assert self.manager.gauges().loading_pages == before.loading_pages + loading

    @rule()
    def deliver(self) -> None:
        """The copies under way end."""
        self.mover.gate.set()
        assert self.tiers.settle(30)
        self.mover.gate.clear()
        self.mover.entered.clear()

    @precondition(lambda self: any(run.seq.fetch for run in self.pool.runs))
    @rule()
    def break_copies(self) -> None:
        """They fail instead: their requests compute, and nothing that they brought is kept."""
        self.mover.broken = True
        self.deliver()
        self.mover.broken = False
        for run in [run for run in self.pool.runs if run.seq.fetch]:
            if run.seq.fetch.failed:
                self.pool.finish(run, keep=False)

    @precondition(lambda self: any(r.seq.fetch and r.seq.fetch.settled for r in self.pool.runs))
    @rule(data=st.data())
    def join_one(self, data) -> None:
        runs = [r for r in self.pool.runs if r.seq.fetch and r.seq.fetch.settled]
        self.join(data.draw(st.sampled_from(runs)))

    def join(self, run: Run) -> None:
        fetch = run.seq.fetch
        fetch.join_all(len(self.mover.layer_bytes))
        self.manager.fetched(run.seq)

    @precondition(lambda self: self.pool.runs)
    @rule(data=st.data(), count=st.integers(1, 24))
    def compute(self, data, count) -> None:
        run = data.draw(st.sampled_from(self.pool.runs))
        if run.seq.fetch is None:
            self.pool.issue_copies(run)
            self.pool.step(run, count, [])
            self.saved_everything()

    @precondition(lambda self: self.pool.runs)
    @rule(data=st.data(), keep=st.booleans())
    def finish_or_abort(self, data, keep) -> None:
        self.pool.finish(data.draw(st.sampled_from(self.pool.runs)), keep=keep)
        self.saved_everything()

    @precondition(lambda self: self.pool.runs)
    @rule(data=st.data())
    def spoil_a_page(self, data) -> None:
        """A page loses what it held, and its tag with it, while nobody uses it."""
        used = {page for run in self.pool.runs for page in run.seq.page_ids}
        cached = [
            page
            for root in self.manager._index.roots.values()
            for node in root.subtree()
            for page in node.pages
            if page not in used
            and page
            not in {copy.source for run in self.pool.runs for copy in run.seq.pending_copies}
        ]
        if cached:
            page = data.draw(st.sampled_from(cached))
            self.mover.contents[page] = [b"spoilt"] * PAGE
            self.manager.tags.clear([page])

    @rule(adapter_id=st.sampled_from([None, "", "lora", *["none of them"] * 12]))
    def change_weights(self, adapter_id) -> None:
        if adapter_id == "none of them":
            return
        self.manager.flush(adapter_id)
        for adapter in ["", "lora"] if adapter_id is None else [adapter_id]:
            self.pool.weights[adapter] = self.pool.weights.get(adapter, 0) + 1
        for run in [r for r in self.pool.runs if adapter_id in (None, r.namespace.adapter_id)]:
            run.flushed = True

    # --- what must always hold -----------------------------------------------------------------
    @invariant()
    def every_page_is_accounted_for_and_read_rightly(self) -> None:
        self.pool.check()
        gauges = self.manager.gauges()
        assert gauges.total_pages == len(self.pool.contents)
        assert min(gauges.free_pages, gauges.cached_pages, gauges.in_use_pages) >= 0
        assert self.tiers.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for run in list(self.pool.runs):
            self.pool.finish(run)
        self.deliver()
        self.manager.flush()
        self.manager.check_integrity()
        assert self.manager.gauges().free_pages == self.manager.usable_pages
        self.mover.gate.set()
        self.tiers.close()


def test_what_comes_back_is_what_was_computed() -> None:
    run_state_machine_as_test(
        TieredMachine,
        settings=settings(
            max_examples=150, stateful_step_count=50, report_multiple_bugs=False, deadline=None
        ),
    )
