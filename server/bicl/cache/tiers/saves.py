"""Pages on their way from the pool to host memory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from bicl.cache.keys import PageChain
from bicl.cache.tiers.host import HostStore
from bicl.cache.tiers.index import Block
from bicl.cache.tiers.mover import Copy, PageMover
from bicl.cache.tiers.stats import TierStats

__all__ = ["SaveQueue"]

BATCH_PAGES = 32
"""Copied at once: bounds how long a claim of one of them can take."""

LINGER_SECONDS = 0.002
"""From the first page that waits to its copy, so that one copy takes all that a step filled: what
issues copies competes with what issues the computation."""


@dataclass(eq=False)
class _Batch:
    """Pages that one step filled. ``pages`` shrinks while it waits, by claims."""

    pages: dict[int, Block]  # slot not chosen yet
    after: object
    issuing: bool = False
    copy: Copy | None = None
    lost: bool = False  # flushed while it was copied


class SaveQueue:
    """Copies pages on a thread of its own, in the order in which they came.

    Args:
        mover: copies.
        host: where to.
        lock, changed: of the tiers; ``changed`` tells of what ended.
        stats: counts here.
        saved: told about blocks that arrived, with the lock held.
    """

    def __init__(
        self,
        mover: PageMover,
        host: HostStore,
        lock: threading.RLock,
        changed: threading.Condition,
        stats: TierStats,
        saved: Callable[[list[Block]], None],
    ) -> None:
        self._mover = mover
        self._host = host
        self._changed = changed
        self._stats = stats
        self._saved = saved
        self._waiting: deque[_Batch] = deque()
        self._by_page: dict[int, _Batch] = {}
        self._keys: set[bytes] = set()
        self._closing = False
        self._work = threading.Condition(lock)
        self._thread = threading.Thread(target=self._loop, name="bicl-tier-save", daemon=True)
        self._thread.start()

    @property
    def idle(self) -> bool:
        return not self._by_page

    def add(self, chain: PageChain, pages: Sequence[int], first: int, after: object) -> None:
        with self._changed:
            batch = self._open_batch(after)
            for number, page in enumerate(pages, first):
                key = chain.key(number)
                if key in self._keys or self._host.get(key) is not None:
                    continue
                if page in self._by_page:
                    self._replace(page)
                block = Block(key, chain.key(number - 1), chain.ids(number), chain.group, -1)
                batch.pages[page] = block
                self._by_page[page] = batch
                self._keys.add(key)
                if len(batch.pages) == BATCH_PAGES:
                    self._waiting.append(batch)
                    batch = _Batch({}, after)
            if batch.pages:
                self._waiting.append(batch)
            self._work.notify()

    def claim(self, pages: Iterable[int], *, finish: bool) -> None:
        if not self._by_page:
            return
        issued = []
        with self._changed:
            for page in pages:
                batch = self._by_page.get(page)
                if batch is None:
                    continue
                if batch.issuing:
                    self._changed.wait_for(lambda b=batch: not b.issuing)  # type: ignore[misc]
                elif finish and batch.copy is None:
                    self._issue_early(batch)
                if self._by_page.get(page) is not batch:  # its copy failed, or found no slot
                    continue
                if batch.copy is not None:
                    issued.append(batch.copy)
                else:
                    self._drop(page, batch.pages.pop(page))
        for copy in issued:
            copy.join()

    def forget(self, group: str | None) -> None:
        """Nothing that is under way may arrive (its weights changed)."""
        with self._changed:
            for batch in set(self._by_page.values()):
                for page, block in list(batch.pages.items()):
                    if group not in (None, block.group):
                        continue
                    if batch.issuing or batch.copy is not None:
                        batch.lost = True
                    else:
                        del batch.pages[page]
                        self._drop(page, block)

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._work.notify()
        self._thread.join()
        while self._waiting:
            batch = self._waiting.popleft()
            if batch.copy is not None:  # begun by a claim: it writes to host memory
                self._copy(batch)

    def _replace(self, page: int) -> None:
        """A page is saved again before its last copy began: it holds something else by now."""
        batch = self._by_page[page]
        if not batch.issuing and batch.copy is None:
            self._drop(page, batch.pages.pop(page))

    # --- inside ------------------------------------------------------------------------------
    def _open_batch(self, after: object) -> _Batch:
        """The last batch that waits, if there is room in it, no longer in the queue; or a new one.
        What was issued before ``after`` was issued before the batch's own mark, too."""
        last = self._waiting[-1] if self._waiting else None
        if last is None or last.copy is not None or len(last.pages) == BATCH_PAGES:
            return _Batch({}, after)
        last.after = after
        return self._waiting.pop()

    def _drop(self, page: int, block: Block) -> None:
        del self._by_page[page]
        self._keys.discard(block.key)
        self._stats.dropped_saves += 1
        self._changed.notify_all()

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._work.wait_for(lambda: self._waiting or self._closing)
                self._work.wait_for(lambda: self._closing, LINGER_SECONDS)
                if self._closing:
                    return
                if not self._waiting:
                    continue
                batch = self._waiting.popleft()
                if batch.copy is None:
                    self._take_slots(batch)
                    batch.issuing = True
            if batch.pages:
                self._copy(batch)

    def _take_slots(self, batch: _Batch) -> None:
        for page, block in list(batch.pages.items()):
            slot = self._host.take_slot()
            if slot is None:
                del batch.pages[page]
                self._drop(page, block)
            else:
                block.place = slot

    def _issue_early(self, batch: _Batch) -> None:
        """On the thread that claims: the other one may be waiting for copies ahead of these. The
        lock is held."""
        self._take_slots(batch)
        if batch.pages:
            self._issue(batch)
            if batch.copy is None:
                self._waiting.remove(batch)
                self._finish(batch, failed=True)

    def _issue(self, batch: _Batch) -> None:
        """Begin the copies of a batch whose slots are chosen; it has no ``copy`` if that fails."""
        slots = [block.place for block in batch.pages.values()]
        with suppress(Exception):
            batch.copy = self._mover.save(list(batch.pages), self._host.arena, slots, batch.after)

    def _copy(self, batch: _Batch) -> None:
        if batch.issuing:
            self._issue(batch)
        failed = batch.copy is None
        if batch.copy is not None:
            with self._changed:
                batch.issuing = False
                self._changed.notify_all()
            try:
                batch.copy.wait()
            except Exception:
                failed = True
        with self._changed:
            self._finish(batch, failed=failed)

    def _finish(self, batch: _Batch, *, failed: bool) -> None:
        """Its copies ended. The lock is held."""
        batch.issuing = False
        if failed:
            self._stats.failures["copy"] += 1
        arrived = []
        for page, block in batch.pages.items():
            if self._by_page.get(page) is batch:
                del self._by_page[page]
            self._keys.discard(block.key)
            if failed or batch.lost:
                self._host.give_back(block.place)
                self._stats.dropped_saves += 1
            else:
                self._host.add(block)
                arrived.append(block)
        self._stats.saved_pages += len(arrived)
        self._stats.saved_bytes += len(arrived) * self._host.arena.slot_bytes
        self._saved(arrived)
        self._changed.notify_all()
