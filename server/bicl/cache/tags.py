"""What each page is known to hold: the chain key of the tokens whose keys and values are in it.

A page gets its tag once the step or the copy that fills it has been issued without an error, and
loses it when it is handed out to be written again. A page without the right tag is never read as
cached, whoever says that it holds a prefix: it was never computed, only half written, or belongs
to other tokens, another tenant, another adapter or other weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["PageTags"]


class PageTags:
    """Page id to chain key."""

    def __init__(self) -> None:
        self._keys: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def get(self, page: int) -> bytes | None:
        return self._keys.get(page)

    def write(self, pages: Iterable[int], keys: Iterable[bytes]) -> None:
        """These pages hold the tokens that these keys name."""
        self._keys.update(zip(pages, keys, strict=True))

    def clear(self, pages: Iterable[int]) -> None:
        """These pages are about to be written again, or cannot be trusted."""
        forget = self._keys.pop
        for page in pages:
            forget(page, None)

    def clear_all(self) -> None:
        """All contents are gone: new memory."""
        self._keys.clear()

    def num_verified(self, pages: Sequence[int], keys: Sequence[bytes]) -> int:
        """Leading pages that carry exactly their keys."""
        found = list(map(self._keys.get, pages))
        if found == keys:
            return len(pages)
        for number, (tag, key) in enumerate(zip(found, keys, strict=False)):
            if tag != key:
                return number
        return min(len(found), len(keys))
