"""Pages outside the pool: host memory, and a local disk below it.

For whoever owns page ids::

    tiers.save(chain, pages)                     # after the step that filled them was issued
    ...
    tiers.claim(pages)                           # before anything overwrites pages
    reservation = tiers.reserve(chain, first, last)
    fetch = reservation.start(page_ids)          # copies run in the background
    for layer in ...: fetch.join(layer)          # before the layer reads them

Nothing here decides about pool pages, and nothing blocks for a copy except ``claim`` (while one
reads the very pages) and ``join``. A page that does not come is computed: every fault is counted
and ends in :class:`~bicl.errors.TransferError` or in a shorter reservation, never in wrong pages.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bicl.cache.keys import PageChain
from bicl.cache.policy import DEFAULT_POLICY
from bicl.cache.tiers.arena import HostArena
from bicl.cache.tiers.costs import TransferCosts
from bicl.cache.tiers.host import HostStore
from bicl.cache.tiers.index import Block
from bicl.cache.tiers.mover import PageMover
from bicl.cache.tiers.saves import SaveQueue
from bicl.cache.tiers.stats import TierStats
from bicl.cache.tiers.transfers import Fetch, Promotion, Reservation
from bicl.errors import ConfigError

if TYPE_CHECKING:
    from bicl.cache.tiers.disk_pipe import DiskPipe

__all__ = ["PageTiers"]


class PageTiers:
    """Host memory and disk for the pages of one pool.

    Args:
        mover: copies pages of the pool.
        page_tokens: tokens a page.
        fingerprint: names weights, layout of a page in all layers and rank, whatever must be equal
            for a page's bytes to mean the same. Only the disk tier needs it.
        host_bytes: memory of the host tier.
        pinned: page-locked memory (for a GPU).
        disk_folder, disk_bytes: the disk tier; none without a folder.
        policy: name of the eviction policy of both tiers.
        clock: seconds that only grow, for the expiry of pins.
        on_change: called by background threads when a fetch or promotion settled; must not block.

    Raises:
        ConfigError: the memory or the folder cannot be used.
    """

    def __init__(
        self,
        mover: PageMover,
        page_tokens: int,
        *,
        fingerprint: bytes,
        host_bytes: int,
        pinned: bool = False,
        disk_folder: Path | None = None,
        disk_bytes: int = 0,
        policy: str = DEFAULT_POLICY,
        clock: Callable[[], float] = time.monotonic,
        on_change: Callable[[], None] | None = None,
    ) -> None:
        page_bytes = sum(mover.layer_bytes)
        self.mover = mover
        self.num_layers = len(mover.layer_bytes)
        self.costs = TransferCosts(page_bytes, page_tokens)
        self.on_change = on_change
        self._stats = TierStats()
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        arena = HostArena(page_bytes, host_bytes, pinned=pinned)
        self._clock = clock
        self._host = HostStore(arena, policy, clock)
        self._stats.host_slots = arena.num_slots
        self._disk: DiskPipe | None = None
        if disk_folder is not None:  # needs a package that only this tier needs
            try:
                from bicl.cache.tiers.disk import DiskStore
                from bicl.cache.tiers.disk_pipe import DiskPipe
            except ImportError as error:
                raise ConfigError(
                    f"the disk tier needs xxhash: pip install xxhash ({error})"
                ) from None

            store = DiskStore(
                disk_folder,
                fingerprint=fingerprint,
                page_bytes=page_bytes,
                max_bytes=disk_bytes,
                policy=policy,
                clock=clock,
            )
            self._disk = DiskPipe(store, self._host, self._changed, self._stats, self.costs)
        self._saves = SaveQueue(mover, self._host, lock, self._changed, self._stats, self._saved)
        self._fetches: deque[Fetch] = deque()
        self._unmeasured: list[Fetch] = []  # settled, waiting times not known yet
        self._queued_pages = 0
        self._closing = False
        self._thread = threading.Thread(target=self._load_loop, name="bicl-tier-load", daemon=True)
        self._thread.start()

    @property
    def has_disk(self) -> bool:
        return self._disk is not None

    # --- pool to host ------------------------------------------------------------------------
    def save(self, chain: PageChain, pages: Sequence[int], first: int = 0) -> None:
        """Copy pages to host memory in the background, unless they are there.

        Call it on the thread that issued what fills them. Whoever hands a page on calls
        :meth:`claim` first.

        Args:
            chain: ``pages`` hold its pages ``first``, ``first + 1``, ...
        """
        self._saves.add(chain, pages, first, self.mover.mark())

    def claim(self, pages: Iterable[int], *, finish: bool = False) -> None:
        """These pages are about to be overwritten by what this thread issues next: saves that
        have not begun are given up, and those that have are waited for (by the device's stream
        where there is one).

        Args:
            finish: saves that have not begun are begun and waited for, too.
        """
        self._saves.claim(pages, finish=finish)

    # --- lookup ------------------------------------------------------------------------------
    def reserve(self, chain: PageChain, first: int, last: int) -> Reservation:
        """The chain's pages ``first .. last`` (exclusive), as far as the host holds them without
        a gap. They count as used."""
        with self._changed:
            blocks = self._host.match(chain, first, last)
            self._host.touch(blocks)
            for block in blocks:
                self._host.lease(block)
        if self._disk is not None and blocks:
            self._disk.used_elsewhere.append([block.key for block in blocks])
        return Reservation(self, blocks)

    def num_in_host(self, chain: PageChain, first: int, last: int) -> int:
        """How many of the chain's pages from ``first`` on :meth:`reserve` would find."""
        with self._changed:
            return len(self._host.match(chain, first, last))

    def touch(self, keys: Sequence[bytes]) -> None:
        """Pages of one chain were used in the pool: their copies here are used, too."""
        self._host.used_elsewhere.append(keys)
        if self._disk is not None:
            self._disk.used_elsewhere.append(keys)

    def promote(self, chain: PageChain, first: int, last: int) -> Promotion | None:
        """Read the chain's pages from ``first`` on from disk, as far as it holds them; None if it
        holds none, or if computing them is faster."""
        if self._disk is None:
            return None
        count = self._disk.num_held(chain, first, last)
        if count == 0:
            return None
        last, queued = first + count, self._disk.num_queued
        known = self._disk.in_memory(chain, first, last)
        if not self.costs.promotion_pays(count, queued_pages=queued, in_memory=known):
            self._stats.skipped_fetches += 1
            self._disk.leave(chain, first, last, self._release, in_memory=known)
            return None
        deadline = time.monotonic() + self.costs.patience_seconds(count)
        return self._disk.promote(
            chain, first, last, deadline, self._release, self._note, in_memory=known
        )

    def fetch_pays(self, num_pages: int) -> bool:
        """Whether pages of the host arrive sooner than they are computed. A no is counted."""
        pays = self.costs.fetch_pays(num_pages, queued_pages=self._queued_pages)
        if not pays:
            self._stats.skipped_fetches += 1
        return pays

    def gave_up_late(self) -> None:
        """A promotion was given up because its deadline passed."""
        self._stats.failures["late"] += 1

    def pin(self, chain: PageChain, first: int, last: int, ttl_seconds: float) -> int:
        """Keep the chain's pages ``first .. last``, as far as the host holds them without a gap, in
        host memory and on disk for a time (infinite: until :meth:`unpin` or :meth:`flush`).
        Returns how many they are.

        Raises:
            CapacityError: pins would protect more than half of the host tier.
        """
        until = self._clock() + ttl_seconds
        with self._changed:
            blocks = self._host.match(chain, first, last)
            self._host.pin(blocks, until)
        if self._disk is not None:
            self._disk.pin([block.key for block in blocks], until)
        return len(blocks)

    def unpin(self, chain: PageChain) -> bool:
        """Take pins off the chain's pages. False: none of them had one."""
        keys = [chain.key(page) for page in range(chain.num_pages)]
        with self._changed:
            found = self._host.unpin(keys)
        if self._disk is not None:
            self._disk.pin(keys, 0.0)
        return found

    # --- the rest ----------------------------------------------------------------------------
    def flush(self, group: str | None = None) -> int:
        """Forget every page, or those of one group, on disk, too; copies under way are lost.
        Returns how many pages were forgotten."""
        self._saves.forget(group)
        with self._changed:
            count = self._host.flush(group)
        if self._disk is not None:
            count += self._disk.flush(group)
        return count

    def measure(self, pages: Sequence[int], rounds: int = 3) -> None:
        """Find out how fast pages come. Overwrites these pages, which nobody may be using."""
        with self._changed:
            slots: list[int] = []
            while len(slots) < len(pages) and (slot := self._host.take_slot()) is not None:
                slots.append(slot)
        targets, seconds = list(pages[: len(slots)]), []
        try:
            for count in [1] * rounds + [len(slots)] * rounds:
                began = time.perf_counter()
                after = self.mover.mark()
                for layer in range(self.num_layers):
                    copy = self.mover.load(
                        layer, targets[:count], self._host.arena, slots[:count], after
                    )
                copy.wait()
                seconds.append(time.perf_counter() - began)
        finally:
            with self._changed:
                for slot in slots:
                    self._host.give_back(slot)
        self.costs.overhead_seconds = min(seconds[:rounds])
        rate = len(slots) * self.costs.page_bytes / min(seconds[rounds:])
        self.costs.host_bytes_per_second = rate
        if self._disk is not None:
            self._disk.measure()

    def stats(self) -> TierStats:
        """Counters and gauges. The object goes on counting; read it at once."""
        self._count_waits()
        with self._changed:
            self._stats.host_pages = len(self._host)
            self._stats.host_evicted_pages = self._host.evicted_pages
            self._stats.host_evicted_seconds = self._host.evicted_seconds
        if self._disk is not None:
            self._disk.fill_gauges()
        return self._stats

    def settle(self, timeout: float | None = None) -> bool:
        """Wait until nothing is under way, writes to disk included. For tests and a clean stop."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._fetches and self._saves.idle and self._pipe_idle,
                None if deadline is None else max(0.0, deadline - time.monotonic()),
            )

    def close(self, timeout: float = 5.0) -> None:
        """End the threads; what is not on disk after ``timeout`` seconds is lost. Idempotent."""
        self.settle(timeout)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._saves.close()
        self._thread.join()
        if self._disk is not None:
            self._disk.close()

    def check_integrity(self) -> bool:
        """Whether every slot is accounted for once nothing is under way."""
        with self._changed:
            return self._host.check()

    # --- inside ------------------------------------------------------------------------------
    @property
    def _pipe_idle(self) -> bool:
        return self._disk is None or self._disk.idle

    def _note(self) -> None:
        if self.on_change is not None:
            self.on_change()

    def _saved(self, blocks: list[Block]) -> None:
        """Pages arrived in host memory. The lock is held."""
        if self._disk is not None:
            self._disk.write_later(blocks)

    def _release(self, blocks: list[Block]) -> None:
        with self._changed:
            self._host.release(blocks)

    def _start(self, blocks: list[Block], pages: list[int]) -> Fetch:
        assert len(blocks) == len(pages)
        fetch = Fetch(blocks, pages, self.mover.mark(), self._changed)
        with self._changed:
            for block in blocks:
                block.from_disk = False
            self._fetches.append(fetch)
            self._queued_pages += len(pages)
            self._changed.notify_all()
        return fetch

    def _load_loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._fetches or self._closing)
                if not self._fetches:
                    return
                fetch = self._fetches[0]
            self._load(fetch)
            with self._changed:
                self._fetches.popleft()
                self._queued_pages -= len(fetch.pages)
                self._host.release(fetch.blocks)
                fetch.settled = True
                if fetch._cancelled:
                    self._stats.cancelled_fetches += 1
                elif not fetch._failed:
                    self._stats.loaded_pages += len(fetch.pages)
                    self._stats.loaded_bytes += len(fetch.pages) * self.costs.page_bytes
                    self._unmeasured.append(fetch)
                self._changed.notify_all()
            self._note()

    def _load(self, fetch: Fetch) -> None:
        """Copy layer after layer; returns when no copy runs any more."""
        slots = [block.place for block in fetch.blocks]
        reason = None
        try:
            for layer in range(self.num_layers):
                with self._changed:
                    if fetch.failed:
                        break
                    if any(self._host.tags.get(b.place) != b.key for b in fetch.blocks):
                        reason = "stale"
                        break
                copy = self.mover.load(layer, fetch.pages, self._host.arena, slots, fetch._after)
                with self._changed:
                    fetch._copies.append(copy)
                    self._changed.notify_all()
            for copy in fetch._copies[-1:]:
                copy.wait()
        except Exception:
            reason = "copy"
        fetch.seconds = time.perf_counter() - fetch.started
        if reason is not None:
            with self._changed:
                fetch._failed = True
                self._stats.failures[reason] += 1
                for block in fetch.blocks:
                    if self._host.get(block.key) is block:
                        self._host.remove(block)
                self._changed.notify_all()

    def _count_waits(self) -> None:
        """Add up what fetches hid and what they did not, as far as it is known."""
        with self._changed:
            unmeasured, self._unmeasured = self._unmeasured, []
        for fetch in unmeasured:
            exposed = fetch.exposed_seconds()
            if exposed is None:
                self._unmeasured.append(fetch)
                continue
            exposed = min(exposed, fetch.seconds)
            self._stats.exposed_seconds += exposed
            self._stats.hidden_seconds += fetch.seconds - exposed
