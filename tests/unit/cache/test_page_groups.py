"""Two page groups behind one manager."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bicl.cache.groups import GroupedManager
from bicl.errors import InvalidInputError

PAGE = 4


def manager(pages: int = 20, group: int = 16, **options) -> GroupedManager:
    return GroupedManager(pages, PAGE, group_pages=group, **options)


def begin(held: GroupedManager, ids: list[int]):
    seq = held.acquire(ids)
    assert seq is not None
    held.commit(seq, ids[seq.num_cached_tokens :])
    return seq


def drop(held: GroupedManager, seq, kept_tokens: int, num_tokens: int) -> int:
    kept = held.begin_drop(kept_tokens)
    assert kept is not None
    return held.finish_drop(seq, kept, num_tokens - kept_tokens)


def test_a_sequence_lies_in_both_groups_with_page_ids_of_their_own() -> None:
    held = manager()
    seq = begin(held, list(range(10)))
    assert len(seq.page_ids) == len(seq.group.pages.page_ids) == 3
    assert held.extend(seq, 13)
    assert len(seq.page_ids) == len(seq.group.pages.page_ids) == 4
    held.release(seq)
    held.check_integrity()
    assert held.gauges().in_use_pages == held.group.gauges().in_use_pages == 0


def test_dropped_tokens_give_pages_up_in_the_second_group_only() -> None:
    held = manager(prefix_cache=False)
    seq = begin(held, list(range(32)))
    assert drop(held, seq, 12, 32) == 5  # of 8
    assert (len(seq.page_ids), len(seq.group.pages.page_ids)) == (8, 3)
    assert held.extend(seq, 33)
    assert (len(seq.page_ids), len(seq.group.pages.page_ids)) == (9, 4)
    assert held.group.gauges().in_use_pages == 4
    held.release(seq)
    held.check_integrity()


def test_what_was_committed_before_a_drop_is_shared_by_both_groups_after_it() -> None:
    held = manager(pages=40, group=40)
    ids = list(range(33))
    first = begin(held, ids)
    drop(held, first, 13, 33)
    second = held.acquire([*ids, 99])
    assert second.num_cached_tokens == 32
    assert second.group.pages.num_cached_tokens == 32
    assert not set(second.group.pages.page_ids) & set(first.group.pages.page_ids)
    for seq in (first, second):
        held.release(seq)
    held.check_integrity()


def test_a_prefix_that_one_group_evicted_is_shared_in_neither() -> None:
    held = manager(pages=40, group=10)
    held.release(begin(held, list(range(33))))
    held.release(begin(held, list(range(100, 137))))  # evicts some in the smaller group
    seq = held.acquire([*range(33), 99])
    assert seq.num_cached_tokens == seq.group.pages.num_cached_tokens
    assert seq.num_cached_tokens < 32
    held.release(seq)
    held.check_integrity()


def test_newest_tokens_are_computed_however_much_is_cached() -> None:
    held = manager(min_computed_tokens=6)
    held.release(begin(held, list(range(20))))
    assert held.cached_tokens(list(range(20))) == 12
    assert held.acquire(list(range(20))).num_cached_tokens == 12


def test_no_room_in_either_group_changes_nothing() -> None:
    held = manager(pages=20, group=6)
    seq = begin(held, list(range(16)))
    assert held.acquire(list(range(100, 112))) is None
    held.check_integrity()
    assert held.gauges().in_use_pages == held.group.gauges().in_use_pages == 4
    held.release(seq)


def test_beginners_leave_a_reserve_while_others_live() -> None:
    held = manager(pages=20, group=8, reserve_pages=3)
    seq = begin(held, list(range(16)))
    assert held.acquire(list(range(100, 108))) is None  # two of the four that are left
    other = held.acquire(list(range(100, 104)))
    assert other is not None
    for each in (seq, other):
        held.release(each)
    alone = held.acquire(list(range(200, 231)))  # nobody else needs a reserve
    assert alone is not None


def test_a_released_sequence_is_known_in_neither() -> None:
    held = manager()
    seq = begin(held, list(range(8)))
    held.release(seq)
    with pytest.raises(InvalidInputError):
        held.extend(seq, 12)


class Machine(RuleBasedStateMachine):
    """Any order of calls keeps every page of both groups accounted for."""

    def __init__(self) -> None:
        super().__init__()
        self.held = manager(pages=24, group=16, reserve_pages=2)
        self.live: list[tuple] = []

    @rule(seed=st.integers(0, 3), length=st.integers(1, 40))
    def begin(self, seed: int, length: int) -> None:
        ids = [seed * 1000 + n // 2 for n in range(length)]
        seq = self.held.acquire(ids)
        if seq is not None:
            self.held.copies_issued(seq)
            self.held.commit(seq, ids[seq.num_cached_tokens :])
            self.live.append((seq, ids))

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 9), count=st.integers(1, 9), exact=st.booleans())
    def grow(self, which: int, count: int, exact: bool) -> None:
        seq, ids = self.live[which % len(self.live)]
        if self.held.extend(seq, len(ids) + count):
            new = list(range(5000, 5000 + count))
            ids += new
            if exact and seq.num_committed_tokens == len(ids) - count:
                self.held.commit(seq, new)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 9), share=st.floats(0.1, 0.9))
    def drop(self, which: int, share: float) -> None:
        seq, ids = self.live[which % len(self.live)]
        holds = len(ids) - seq.group.num_dropped_tokens
        keeps = max(1, int(share * holds))
        kept = self.held.begin_drop(keeps)
        if kept is not None:
            self.held.finish_drop(seq, kept, holds - keeps)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 9), keep=st.booleans())
    def release(self, which: int, keep: bool) -> None:
        seq, _ = self.live.pop(which % len(self.live))
        self.held.release(seq, keep=keep)

    @rule()
    def flush(self) -> None:
        self.held.flush()

    @invariant()
    def all_pages_are_accounted_for(self) -> None:
        self.held.check_integrity()
        for seq, ids in self.live:
            places = len(ids) - seq.group.num_dropped_tokens
            assert len(seq.group.pages.page_ids) * PAGE >= places
            assert len(seq.page_ids) * PAGE >= len(ids)

    def teardown(self) -> None:
        for seq, _ in self.live:
            self.held.release(seq)
        self.held.flush()
        assert self.held.gauges().free_pages == 24
        assert self.held.group.gauges().free_pages == 16


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
