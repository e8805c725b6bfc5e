"""Which item leaves first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bicl.cache.policy import POLICIES, LfuAged, Lru, make_policy

ITEMS = "abcdef"


def evict(policy) -> str:
    item = next(iter(policy.candidates()))
    policy.discard(item)
    return item


@pytest.mark.parametrize("name", POLICIES)
def test_every_item_is_named_once_and_leaves_once(name: str) -> None:
    policy = make_policy(name, 8)
    for item in "abc":
        policy.touch(item)
    policy.touch("a")
    policy.discard("unknown")
    assert sorted(policy.candidates()) == ["a", "b", "c"]
    assert sorted(evict(policy) for _ in range(3)) == ["a", "b", "c"]
    assert list(policy.candidates()) == []


@pytest.mark.parametrize("name", POLICIES)
def test_item_that_may_not_leave_is_not_named_first_again(name: str) -> None:
    policy = make_policy(name, 8)
    for item in "abc":
        policy.touch(item)
    policy.postpone("a")
    assert list(policy.candidates()) == ["b", "c", "a"]


def test_recent_use_counts_for_lru_and_frequent_use_for_lfu() -> None:
    for kind, victim in ((Lru, "often"), (LfuAged, "late")):
        policy = kind(8)
        policy.touch("often")
        for _ in range(3):
            policy.touch("often")
        policy.touch("late")
        assert evict(policy) == victim


def test_frequent_use_of_long_ago_is_overtaken() -> None:
    policy = LfuAged(8)
    policy.touch("old")
    for _ in range(4):
        policy.touch("old")
    left = []
    for number in range(10):
        policy.touch(number)
        left.append(evict(policy))
    assert left == [0, 1, 2, 3, "old", 4, 5, 6, 7, 8]


@given(st.lists(st.tuples(st.sampled_from(["use", "discard", "evict", "postpone"]),
                          st.sampled_from(ITEMS)), max_size=200))  # fmt: skip
def test_aged_frequency_is_what_it_says(steps: list[tuple[str, str]]) -> None:
    policy = LfuAged(4)
    uses: dict[str, int] = {}
    ranks: dict[str, tuple[int, int]] = {}
    floor = 0
    for now, (what, item) in enumerate(steps):
        if what == "use":
            uses[item] = uses.get(item, 0) + 1
            ranks[item] = floor + uses[item], now
            policy.touch(item)
        elif what == "evict" and ranks:
            victim = min(ranks, key=lambda name: ranks[name])
            floor = max(floor, ranks[victim][0])
            del uses[victim], ranks[victim]
            assert evict(policy) == victim
        elif what == "discard":
            uses.pop(item, None), ranks.pop(item, None)
            policy.discard(item)
        elif what == "postpone" and item in ranks:
            ranks[item] = floor + uses[item] + 1, now
            policy.postpone(item)
    order = sorted(ranks, key=lambda name: ranks[name])
    assert list(policy.candidates()) == order
    assert list(policy.candidates()) == order  # asking changes nothing
