"""What requests hold while they wait: pages taken early, pages on their way, reads from disk."""

from __future__ import annotations

from collections import deque
from itertools import islice

from bicl.cache.manager import CacheManager
from bicl.cache.sequence import SequencePages
from bicl.frontends.http.engine.sequence import Sequence

__all__ = ["PREFETCH_WINDOW", "EarlyPages"]

PREFETCH_WINDOW = 8
"""Waiting requests whose pages may come early."""


class EarlyPages:
    """Takes and gives back what sequences hold that have no row yet."""

    def __init__(self, manager: CacheManager) -> None:
        self._manager = manager

    def hold(self, sequence: Sequence) -> bool:
        """Room for all of its tokens so far."""
        if sequence.pages is not None:
            return self._manager.extend(sequence.pages, len(sequence.ids))
        sequence.pages = self._acquire(sequence)
        return sequence.pages is not None

    def fetch(self, sequence: Sequence) -> None:
        """Let come what only the tiers hold, if they do and there is plenty of room."""
        room = self._manager.available_pages > self._manager.usable_pages // 4
        if sequence.pages is None and not sequence.sought_in_host and room:
            sequence.sought_in_host = True
            sequence.pages = self._acquire(sequence, early=True)

    def look_below(self, waiting: deque[Sequence]) -> None:
        """Remember of whom host memory holds nothing: spares the next plan these lookups."""
        if not self._manager.has_tiers:
            return
        later = (sequence for sequence in waiting if sequence.pages is None)
        for sequence in islice(later, PREFETCH_WINDOW):
            if not sequence.sought_in_host and not self.is_read(sequence):
                prompt, namespace = sequence.packed_prompt, sequence.namespace
                sequence.sought_in_host = not self._manager.host_holds_more(prompt, namespace)

    def is_read(self, sequence: Sequence) -> bool:
        """Its prefix is being read from disk, and computing it would not be faster yet."""
        if not sequence.sought_on_disk:
            sequence.sought_on_disk = True
            sequence.promotion = self._manager.promote(sequence.packed_prompt, sequence.namespace)
        if sequence.waits_for_disk:
            return True
        if sequence.promotion is not None and not sequence.promotion.settled:
            self._manager.gave_up_late()
            self.close_promotion(sequence)
        return False

    def drop_last(self, waiting: deque[Sequence]) -> bool:
        """Take back pages that came early, the last in the queue first. False: there are none."""
        for sequence in reversed(waiting):
            if sequence.pages is not None:
                self.let_go(sequence)
                return True
        return False

    def let_go(self, sequence: Sequence) -> None:
        """It waits, or is gone: it holds nothing any more."""
        self.close_promotion(sequence)
        if sequence.pages is not None:
            self._manager.release(sequence.pages)
            sequence.pages = None

    def forget(self, sequence: Sequence) -> None:
        """What it holds is to be forgotten; it may look again."""
        self.let_go(sequence)
        sequence.sought_in_host = sequence.sought_on_disk = False

    def close_promotion(self, sequence: Sequence) -> None:
        if sequence.promotion is not None:
            sequence.promotion.close()
            sequence.promotion = None

    def _acquire(self, sequence: Sequence, *, early: bool = False) -> SequencePages | None:
        """Its pages; ``early``: only those that come from the tiers, if any do."""
        return self._manager.acquire(
            sequence.packed_prompt if sequence.num_generated == 0 else sequence.ids,
            sequence.namespace,
            num_tokens=1 if early else None,
            reuse=not sequence.wants_prefill_logprobs,
            resumed=sequence.num_preemptions + sequence.num_retries > 0,
            only_arriving=early,
            from_tiers=sequence.num_retries == 0,
        )
