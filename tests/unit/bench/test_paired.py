"""Medians of what is measured in turns."""

from __future__ import annotations

import random
import statistics
from itertools import islice, permutations

import pytest

from bench.serving.paired import median_of, orders


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_every_order_comes_equally_often_and_before_its_reverse(count: int) -> None:
    ways = list(islice(orders("abcd"[:count]), 2 * len(list(permutations(range(count))))))
    assert {ways.count(way) for way in permutations("abcd"[:count])} == {2}
    if count > 1:
        assert all(a == b[::-1] for a, b in zip(ways[::2], ways[1::2], strict=True))


def test_the_interval_holds_the_true_median_in_95_of_100_cases() -> None:
    rng = random.Random(0)
    found = [median_of(rng.gauss(1.0, 0.1) for _ in range(21)) for _ in range(2000)]
    held = statistics.mean(median.low <= 1.0 <= median.high for median in found)
    assert 0.93 < held < 0.99


def test_few_values_are_their_own_interval() -> None:
    median = median_of([3.0, 1.0, 2.0])
    assert (median.value, median.low, median.high, median.count) == (2.0, 1.0, 3.0, 3)
