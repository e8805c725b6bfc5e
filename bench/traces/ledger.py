"""Tiers without bytes: bookkeeping at full size on a small machine."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bicl.cache.policy import DEFAULT_POLICY
from bicl.cache.tiers import Copy, Done, PageTiers
from bicl.cache.tiers.arena import HostArena

__all__ = ["ledger_tiers"]

PAGE_BYTES = 8


class _Ledger:
    """``PageMover`` of a pool that does not exist."""

    layer_bytes = (PAGE_BYTES,)

    def mark(self) -> object:
        return None

    def save(
        self, pages: Sequence[int], arena: HostArena, slots: Sequence[int], after: object
    ) -> Copy:
        return Done()

    def load(
        self,
        layer: int,
        pages: Sequence[int],
        arena: HostArena,
        slots: Sequence[int],
        after: object,
    ) -> Copy:
        return Done()


@contextmanager
def ledger_tiers(
    page_tokens: int, *, host_pages: int, disk_pages: int = 0, policy: str = DEFAULT_POLICY
) -> Iterator[PageTiers]:
    """Tiers that hold so many pages. Those on disk are real files in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="bicl-trace-") as folder:
        tiers = PageTiers(
            _Ledger(),
            page_tokens,
            fingerprint=b"ledger",
            host_bytes=host_pages * PAGE_BYTES,
            disk_folder=Path(folder) if disk_pages else None,
            disk_bytes=disk_pages * (4096 + PAGE_BYTES),
            policy=policy,
        )
        try:
            yield tiers
        finally:
            tiers.close()
