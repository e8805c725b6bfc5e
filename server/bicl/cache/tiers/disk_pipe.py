"""Pages on their way between host memory and disk."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bicl.cache.keys import PageChain
from bicl.cache.tiers.costs import TransferCosts
from bicl.cache.tiers.disk import DiskReadError, DiskStore
from bicl.cache.tiers.host import HostStore
from bicl.cache.tiers.index import Block
from bicl.cache.tiers.stats import TierStats
from bicl.cache.tiers.transfers import Promotion

__all__ = ["DiskPipe"]

log = logging.getLogger(__name__)

READERS = 8
"""A disk answers several at once, and each also verifies what it read."""

MEASURED_BYTES = 64 << 20
"""Read at start, if host memory has room; but a page, however large. A few pages would tell how
long the first ones take."""

SAMPLE_SECONDS = 0.25
"""Between looks at how fast a disk is that was too slow."""


class DiskPipe:
    """Writes behind what arrives in host memory; reads what requests ask for.

    Args:
        store: the files.
        host: where pages come from and go to.
        changed: lock and signal of the tiers.
        stats, costs: count and measure here.
    """

    def __init__(
        self,
        store: DiskStore,
        host: HostStore,
        changed: threading.Condition,
        stats: TierStats,
        costs: TransferCosts,
    ) -> None:
        self._store = store
        self._host = host
        self._changed = changed
        self._stats = stats
        self._costs = costs
        self._behind: deque[Block] = deque()
        # What waits cannot leave host memory; half of it must stay free to move.
        self._max_behind = max(1, host.arena.num_slots // 2)
        self._writing = False
        self._epoch = 0
        self.num_queued = 0
        self._next_sample = 0.0
        self._closing = False
        self._refused = False
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="bicl-tier-read")
        self._writer = threading.Thread(
            target=self._write_loop, name="bicl-tier-write", daemon=True
        )
        self._writer.start()

    @property
    def used_elsewhere(self) -> deque[Sequence[bytes]]:
        """Where to put the keys of a chain that was used in a tier above."""
        return self._store.used_elsewhere

    @property
    def idle(self) -> bool:
        return not self._behind and not self._writing and not self.num_queued

    def num_held(self, chain: PageChain, first: int, last: int) -> int:
        """Pages from ``first`` on that are in host memory or on disk, without a gap, if the disk
        holds any of them; else 0."""
        page, on_disk = first, False
        with self._changed:
            while page < last:
                key = chain.key(page)
                if self._host.get(key) is None:
                    if key not in self._store:
                        break
                    on_disk = True
                page += 1
        return page - first if on_disk else 0

    def in_memory(self, chain: PageChain, first: int, last: int) -> bool:
        """Whether the kernel has the files of the pages ``first .. last`` that host memory lacks in
        its own, by the first, a middle and the last of them: nothing is waited for, but each look
        takes some microseconds."""
        keys = [chain.key(page) for page in range(first, last)]
        with self._changed:
            away = [key for key in keys if self._host.get(key) is None]
        return bool(away) and self._store.in_memory([away[0], away[len(away) // 2], away[-1]])

    def promote(
        self,
        chain: PageChain,
        first: int,
        last: int,
        deadline: float,
        release: Callable[[list[Block]], None],
        note: Callable[[], None],
        *,
        in_memory: bool = False,
    ) -> Promotion:
        """Read the chain's pages ``first .. last`` into host memory."""
        self._store.touch([chain.key(page) for page in range(first, last)])
        promotion = Promotion(last - first, deadline, self._changed, release, in_memory)
        self._submit(promotion, chain, first, note)
        return promotion

    def leave(
        self,
        chain: PageChain,
        first: int,
        last: int,
        release: Callable[[list[Block]], None],
        *,
        in_memory: bool = False,
    ) -> None:
        """The chain's pages ``first .. last`` were asked for, and are computed because the disk is
        slow. Idle readers read the first of them now and then all the same: for nobody, but the
        disk's rate would stay what it was once."""
        self._store.touch([chain.key(page) for page in range(first, last)])
        now = time.monotonic()
        if self.num_queued or now < self._next_sample:
            return
        self._next_sample = now + SAMPLE_SECONDS
        count = min(READERS, last - first)
        sample = Promotion(count, now, self._changed, release, in_memory)
        self._submit(sample, chain, first, sample.close)

    def measure(self) -> None:
        """Find out how fast pages come when all readers read, from the disk and from the kernel's
        memory; the files are deleted again. What the disk refuses is logged, and its speed stays
        unknown."""
        slots: list[int] = []
        with self._changed:
            count = max(1, min(MEASURED_BYTES // self._costs.page_bytes, self._host.num_free))
            while len(slots) < count and (slot := self._host.take_slot()) is not None:
                slots.append(slot)
        pages = [self._host.arena.bytes_of(slot) for slot in slots]
        files: list[Path] = []
        try:
            files += map(self._store.write_probe, pages)
            self._costs.disk_bytes_per_second = self._time_probes(files, pages)
            self._costs.cached_bytes_per_second = max(
                self._time_probes(files, pages) for _ in range(3)
            )
        except OSError as error:
            log.warning("the disk tier could not be measured: %s", error)
        finally:
            for file in files:
                file.unlink(missing_ok=True)
            with self._changed:
                for slot in slots:
                    self._host.give_back(slot)

    def write_later(self, blocks: list[Block]) -> None:
        """These blocks arrived in host memory. The lock is held."""
        for block in blocks:
            if block.key in self._store:
                continue
            if len(self._behind) == self._max_behind:
                self._host.release([self._behind.popleft()])
                self._stats.disk_dropped_pages += 1
            self._host.lease(block)
            self._behind.append(block)

    def pin(self, keys: list[bytes], until: float) -> None:
        self._store.pin(keys, until)

    def flush(self, group: str | None) -> int:
        with self._changed:
            self._epoch += 1
            gone = [block for block in self._behind if group in (None, block.group)]
            for block in gone:
                self._behind.remove(block)
            self._host.release(gone)
        return self._store.flush(group)

    def fill_gauges(self) -> None:
        self._stats.disk_pages = len(self._store)
        self._stats.disk_bytes = self._store.num_bytes
        self._stats.disk_max_bytes = self._store.max_bytes
        self._stats.disk_evicted_pages = self._store.evicted_pages
        self._stats.disk_evicted_seconds = self._store.evicted_seconds

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._readers.shutdown(cancel_futures=True)
        self._writer.join()
        self._store.close()

    # --- inside ------------------------------------------------------------------------------
    def _submit(
        self, promotion: Promotion, chain: PageChain, first: int, note: Callable[[], None]
    ) -> None:
        with self._changed:
            self.num_queued += promotion.num_pages
            epoch = self._epoch
        for page in range(first, first + promotion.num_pages):
            wanted = Block(chain.key(page), chain.key(page - 1), chain.ids(page), chain.group, -1)
            self._readers.submit(self._read, promotion, wanted, epoch, note)

    def _time_probes(self, files: list[Path], pages: list[memoryview]) -> float:
        """Bytes a second."""
        began = time.perf_counter()
        list(self._readers.map(self._store.read_probe, files, pages))
        return len(files) * self._costs.page_bytes / (time.perf_counter() - began)

    def _read(
        self, promotion: Promotion, wanted: Block, epoch: int, note: Callable[[], None]
    ) -> None:
        block = None
        try:
            block = self._bring(promotion, wanted, epoch)
        except Exception:  # whatever it was, the page is computed instead
            log.exception("a page could not be read from disk")
            self._stats.failures["io"] += 1
        with self._changed:
            self.num_queued -= 1
            if block is None or promotion.given_up:
                if block is not None:
                    self._host.release([block])
                promotion._page_ended(None)
            else:
                promotion._page_ended(block)
            settled = promotion.settled
            self._changed.notify_all()
        if settled:
            note()

    def _bring(self, promotion: Promotion, wanted: Block, epoch: int) -> Block | None:
        """The block in host memory, leased; None if it will not come."""
        with self._changed:
            found = self._host.get(wanted.key)
            if found is not None:
                self._host.lease(found)
                return found
            if promotion.given_up or promotion.broken:
                return None
            slot = self._host.take_slot()
            if slot is None:
                return None
            at_once = min(READERS, self.num_queued)
        began = time.perf_counter()
        reason: str | None = None
        try:
            page = self._host.arena.bytes_of(slot)
            self._store.read(wanted.key, wanted.ids, page)
        except DiskReadError as error:
            reason = error.reason
        num_bytes = at_once * self._costs.page_bytes
        seconds = time.perf_counter() - began
        self._costs.saw_disk(num_bytes, seconds, in_memory=promotion.in_memory)
        with self._changed:
            if reason is not None:
                self._stats.failures[reason] += 1
                promotion.broken = True
            found = self._host.get(wanted.key)
            if reason is not None or found is not None or epoch != self._epoch:
                self._host.give_back(slot)
                if found is not None:
                    self._host.lease(found)
                return found
            wanted.place, wanted.from_disk = slot, True
            self._host.add(wanted)
            self._host.lease(wanted)
            self._stats.disk_read_pages += 1
            self._stats.disk_read_bytes += self._costs.page_bytes
            return wanted

    def _write_loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._behind or self._closing)
                if self._closing:
                    return
                block = self._behind.popleft()
                self._writing = True
            written = self._write(block)
            with self._changed:
                self._writing = False
                self._host.release([block])
                self._stats.disk_written_pages += written
                self._stats.disk_written_bytes += written * self._costs.page_bytes
                self._changed.notify_all()

    def _write(self, block: Block) -> bool:
        page = self._host.arena.bytes_of(block.place)
        try:
            return self._store.write(block.key, block.parent, block.ids, block.group, page)
        except OSError as error:
            self._stats.disk_dropped_pages += 1
            self._stats.failures["io"] += 1
            if not self._refused:
                log.warning("the disk tier cannot write (counted from now on): %s", error)
            self._refused = True
            return False
