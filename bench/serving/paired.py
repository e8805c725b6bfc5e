"""Two ways of doing the same, measured in turns: medians of the ratios of what came together.

A machine drifts (clocks, heat, neighbours) by more than what is looked for. What is measured side
by side drifts together, so a ratio is taken within each pair, and pairs take every order in turn.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

__all__ = ["Median", "median_of", "orders"]

T = TypeVar("T")


@dataclass(frozen=True)
class Median:
    """A median, and the interval in which that of very many such values lies in 95 of 100 cases."""

    value: float
    low: float
    high: float
    count: int


def median_of(values: Iterable[float]) -> Median:
    """The median of independent values. The interval's ends are those of them between whose ranks
    the median lies, by the binomial distribution."""
    ranked = sorted(values)
    count = len(ranked)
    margin = 0.98 * math.sqrt(count)
    low, high = math.floor((count - 1) / 2 - margin), math.ceil((count - 1) / 2 + margin)
    return Median(
        statistics.median(ranked), ranked[max(0, low)], ranked[min(count - 1, high)], count
    )


def orders(items: Sequence[T]) -> Iterator[tuple[T, ...]]:
    """Every order of the items, again and again; each is followed by its reverse."""
    ways = list(itertools.permutations(range(len(items))))
    forward = [way for way in ways if way <= way[::-1]]
    ordered = [way for each in forward for way in (each, each[::-1])]
    return itertools.cycle([tuple(items[i] for i in way) for way in ordered])
