"""What a caller holds of pages that are on their way: reservations, fetches, promotions."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from bicl.cache.tiers.index import Block
from bicl.cache.tiers.mover import Copy
from bicl.errors import TransferError

if TYPE_CHECKING:
    from bicl.cache.tiers.tiers import PageTiers

__all__ = ["Fetch", "Promotion", "Reservation"]


class Reservation:
    """Blocks of a chain that the host holds and keeps until :meth:`start` or :meth:`drop`.

    Attributes:
        blocks: of consecutive pages.
        num_pages: how many.
        num_from_disk: how many of them had to be read from disk for this use.
    """

    def __init__(self, tiers: PageTiers, blocks: list[Block]) -> None:
        self.blocks = blocks
        self._tiers = tiers
        self._held = True

    @property
    def num_pages(self) -> int:
        return len(self.blocks)

    @property
    def num_from_disk(self) -> int:
        return sum(block.from_disk for block in self.blocks)

    def start(self, pages: Sequence[int]) -> Fetch:
        """Begin to copy the blocks into these pages, behind all work issued so far.

        Args:
            pages: as many as there are blocks, in order; nothing may read or write them before
                the fetch is joined, or has settled.
        """
        assert self._held, "a reservation starts once"
        self._held = False
        return self._tiers._start(self.blocks, list(pages))

    def drop(self) -> None:
        """Let the blocks go. Idempotent; does nothing after :meth:`start`."""
        if self._held:
            self._held = False
            self._tiers._release(self.blocks)


class Fetch:
    """Pages on their way from host memory into the pool, layer by layer.

    Attributes:
        blocks, pages: what goes where.
        seconds: from its start until all pages were there.
        settled: no copy runs or will start any more; only then may the pages of a fetch that was
            cancelled or failed be used for something else.
    """

    def __init__(
        self, blocks: list[Block], pages: list[int], after: object, changed: threading.Condition
    ) -> None:
        self.blocks = blocks
        self.pages = pages
        self.settled = False
        self.started = time.perf_counter()
        self.seconds = 0.0
        self._after = after
        self._changed = changed
        self._copies: list[Copy] = []
        self._cancelled = False
        self._failed = False
        self._blocked_seconds = 0.0

    @property
    def failed(self) -> bool:
        """The pages will not come: compute their tokens."""
        return self._failed or self._cancelled

    def join(self, layer: int) -> None:
        """Order what this thread issues from now on after the layer's pages. Returns as soon as
        their copies are issued; on the CPU, when they are there.

        Raises:
            TransferError: they will not come.
        """
        if len(self._copies) <= layer and not self.failed:
            began = time.perf_counter()
            with self._changed:
                self._changed.wait_for(lambda: len(self._copies) > layer or self.failed)
            self._blocked_seconds += time.perf_counter() - began
        if self.failed:
            raise TransferError(f"{len(self.pages)} pages did not come from the host tier")
        self._copies[layer].join()

    def join_all(self, num_layers: int) -> None:
        """:meth:`join` for every layer."""
        for layer in range(num_layers):
            self.join(layer)

    def issued(self, num_layers: int) -> bool:
        """Block until the copies of all layers are issued: from then on nothing but the device
        itself can break them off. False: they will not come."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._copies) >= num_layers or self.failed)
        return not self.failed

    def cancel(self) -> None:
        """Issue no further copies; those that run go on, see ``settled``. Idempotent."""
        with self._changed:
            if not self.settled:
                self._cancelled = True
                self._changed.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        """Block until it settled. False: not within ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self.settled, timeout)

    def exposed_seconds(self) -> float | None:
        """How long computation waited for the pages; None while that is not known."""
        waits = [copy.exposed_seconds() for copy in self._copies]
        if any(wait is None for wait in waits):
            return None
        return self._blocked_seconds + sum(wait for wait in waits if wait is not None)


class Promotion:
    """Pages on their way from disk to host memory. They stay there until :meth:`close`.

    Attributes:
        num_pages: asked for.
        deadline: ``time.monotonic()`` at which computing the tokens would have been as fast.
        in_memory: the kernel had their files in memory.
        broken: a page did not come, and those behind it are of no use.
    """

    def __init__(
        self,
        num_pages: int,
        deadline: float,
        changed: threading.Condition,
        release: Callable[[list[Block]], None],
        in_memory: bool = False,
    ) -> None:
        self.num_pages = num_pages
        self.deadline = deadline
        self.in_memory = in_memory
        self._changed = changed
        self._release = release
        self._open = num_pages
        self._blocks: list[Block] = []
        self._given_up = False
        self.broken = False

    @property
    def settled(self) -> bool:
        """No read runs or will start any more."""
        return self._open == 0

    @property
    def given_up(self) -> bool:
        return self._given_up

    def wait(self, timeout: float | None = None) -> bool:
        """Block until it settled. False: not within ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self.settled, timeout)

    def close(self) -> None:
        """Start no further reads and let go of the pages. Idempotent."""
        with self._changed:
            self._given_up = True
            blocks, self._blocks = self._blocks, []
        self._release(blocks)

    def _page_ended(self, block: Block | None) -> None:
        """A page is there, or (None) will not come. The lock is held."""
        self._open -= 1
        if block is not None:
            self._blocks.append(block)
        if self.settled:
            self._changed.notify_all()
