"""Which tokens each page holds, as far as this shard computed them itself.

TGI's router decides which pages a request shares, and can offer pages that were never computed
(after a failed, dropped or cancelled prefill). The shard sees the whole prompt, so it can check.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bicl.cache.keys import ID_BYTES, Namespace, chain_key, pack_ids, root_key

__all__ = ["PageTags", "Prompt", "TagCounters"]


@dataclass
class TagCounters:
    """Monotonic.

    Attributes:
        claimed_tokens: that the router called cached.
        accepted_tokens: of them, those whose pages carry the right tags.
        rejected_claims: requests whose claim was lowered.
    """

    claimed_tokens: int = 0
    accepted_tokens: int = 0
    rejected_claims: int = 0


class Prompt:
    """One request's token ids and the keys of its complete pages, computed as far as asked for."""

    def __init__(self, token_ids: Sequence[int], page_size: int, adapter_id: str = "") -> None:
        self._packed = pack_ids(token_ids)
        self._page_bytes = page_size * ID_BYTES
        self._keys = [root_key(Namespace(adapter_id=adapter_id))]

    def key(self, index: int) -> bytes | None:
        """Key of the ``index``-th page; None if the prompt does not fill it."""
        if (index + 1) * self._page_bytes > len(self._packed):
            return None
        while len(self._keys) <= index + 1:
            start = (len(self._keys) - 1) * self._page_bytes
            page = self._packed[start : start + self._page_bytes]
            self._keys.append(chain_key(self._keys[-1], page))
        return self._keys[index + 1]


class PageTags:
    """Page id to the key of what was written there. The router's page 0 never has one."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.counters = TagCounters()
        self._keys: dict[int, bytes] = {}

    def admit(self, prompt: Prompt, pages: Sequence[int], claimed: int) -> int:
        """Check a request's claim, and forget what its other pages held.

        Args:
            pages: of the request, in order.
            claimed: tokens that the router calls cached.

        Returns:
            How many of them are. A claim that ends inside a page counts with the whole page.
        """
        accepted = 0
        while accepted < claimed:
            index = accepted // self.page_size
            key = prompt.key(index)
            if key is None or self._keys.get(pages[index]) != key:
                break
            accepted = min(claimed, accepted + self.page_size)
        for page in pages[-(-accepted // self.page_size) :]:
            self._keys.pop(page, None)
        self.counters.claimed_tokens += claimed
        self.counters.accepted_tokens += accepted
        self.counters.rejected_claims += accepted < claimed
        return accepted

    def record(self, prompt: Prompt, pages: Sequence[int], start: int, end: int) -> None:
        """Tokens ``start .. end`` of the prompt are written: tag the pages they complete."""
        for index in range(start // self.page_size, end // self.page_size):
            key = prompt.key(index)
            if key is not None and pages[index] != 0:
                self._keys[pages[index]] = key

    def clear(self) -> None:
        """The pages are gone: new memory."""
        self._keys.clear()
