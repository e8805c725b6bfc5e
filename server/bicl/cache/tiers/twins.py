"""Pages of two groups that hold the same tokens, for tiers that know a page by one number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["PageTwins"]


class PageTwins:
    """Which page of a second page group goes with each page of the first.

    To the tiers a page is its number in the first group. In the layers of the second its bytes lie
    in another page, its twin. Whoever hands pages to the tiers pairs them before, and neither of
    two is handed out again while a copy of them runs.

    Args:
        num_pages, group_pages: of the first and the second group.
        layers: numbers of the second group's layers.
    """

    def __init__(self, num_pages: int, group_pages: int, layers: Iterable[int]) -> None:
        self.layers = frozenset(layers)
        # Any page will do at first: at start copies are timed that nobody reads.
        self._twin = np.arange(num_pages, dtype=np.int64) % group_pages
        self._owner = np.full(group_pages, -1, dtype=np.int64)

    def pair(self, pages: Sequence[int], twins: Sequence[int]) -> None:
        """Each page with the twin in its place."""
        self._twin[pages] = twins
        self._owner[twins] = pages

    def of(self, pages: Sequence[int]) -> npt.NDArray[np.int64]:
        """int64 ``[n]``, the twins of the first group's pages."""
        return self._twin[np.asarray(pages, dtype=np.int64)]

    def owners(self, twins: Sequence[int]) -> list[int]:
        """The first group's pages that are paired with these now."""
        owners = self._owner[twins]
        current: list[int] = owners[(owners >= 0) & (self._twin[owners] == twins)].tolist()
        return current
