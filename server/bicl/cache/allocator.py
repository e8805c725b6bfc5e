"""Hands out page ids and counts who holds them. Knows neither tensors nor tokens."""

from __future__ import annotations

from collections.abc import Iterable

from bicl.errors import ConfigError, IntegrityError

__all__ = ["PageAllocator"]


class PageAllocator:
    """Free list and reference counts over page ids ``0 .. num_pages - 1``.

    Args:
        num_pages: pages of the pool.
        reserved_pages: that many pages at the front are never handed out.

    Raises:
        ConfigError: no page is left to hand out.
    """

    def __init__(self, num_pages: int, reserved_pages: int = 0) -> None:
        if reserved_pages < 0 or num_pages - reserved_pages < 1:
            raise ConfigError(
                f"{num_pages} pages of which {reserved_pages} are reserved leave none to use; "
                f"at least {max(reserved_pages, 0) + 1} are needed"
            )
        self.num_pages = num_pages
        self.reserved_pages = reserved_pages
        self._free: list[int]
        self._counts: dict[int, int] = {}  # has a page exactly while it is allocated
        self.reset()

    @property
    def usable_pages(self) -> int:
        return self.num_pages - self.reserved_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def references(self, page: int) -> int:
        """How many hold ``page``; 0 if it is free, reserved or unknown."""
        return self._counts.get(page, 0)

    def allocate(self, num_pages: int) -> list[int] | None:
        """``num_pages`` pages held once each, or None, and then nothing changed."""
        if num_pages > len(self._free):
            return None
        if num_pages <= 0:
            return []
        pages = self._free[-num_pages:]
        del self._free[-num_pages:]
        pages.reverse()
        self._counts.update(dict.fromkeys(pages, 1))
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Hold allocated pages once more.

        Raises:
            IntegrityError: a page is not allocated.
        """
        counts = self._counts
        try:
            for page in pages:
                counts[page] += 1
        except KeyError as error:
            raise IntegrityError(f"page {error} is retained but not allocated") from None

    def release(self, pages: Iterable[int]) -> int:
        """Let go of pages; those that nobody holds any more become free.

        Returns:
            How many became free.

        Raises:
            IntegrityError: a page is not allocated (freed twice, or never handed out).
        """
        counts, free = self._counts, self._free
        before = len(free)
        try:
            for page in pages:
                if counts[page] == 1:
                    del counts[page]
                    free.append(page)
                else:
                    counts[page] -= 1
        except KeyError as error:
            raise IntegrityError(f"page {error} is released but not allocated") from None
        return len(free) - before

    def reset(self) -> None:
        """Every usable page is free, whoever held it."""
        self._free = list(range(self.num_pages - 1, self.reserved_pages - 1, -1))
        self._counts.clear()

    def check_integrity(self) -> None:
        """Every usable page is either free or held.

        Raises:
            IntegrityError: naming the contradiction.
        """
        free, held = set(self._free), set(self._counts)
        if len(free) != len(self._free):
            raise IntegrityError("a page is in the free list twice")
        if free & held:
            raise IntegrityError(f"pages {sorted(free & held)[:8]} are both free and held")
        usable = set(range(self.reserved_pages, self.num_pages))
        if (free | held) != usable:
            strange = sorted((free | held) ^ usable)
            raise IntegrityError(f"pages {strange[:8]} are lost or unknown")
        if any(count < 1 for count in self._counts.values()):
            raise IntegrityError("a held page has a reference count below 1")
