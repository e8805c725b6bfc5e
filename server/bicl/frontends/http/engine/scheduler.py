"""Who runs next, on which pages. Owns the queue, the running batch and the page bookkeeping."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice

from bicl.cache.keys import ID_BYTES
from bicl.cache.manager import CacheManager
from bicl.cache.stats import FlushReport
from bicl.errors import CapacityError, OverloadedError
from bicl.frontends.http.engine.config import EngineConfig
from bicl.frontends.http.engine.early_pages import PREFETCH_WINDOW, EarlyPages
from bicl.frontends.http.engine.plan import Chunk, Plan
from bicl.frontends.http.engine.sequence import LogitsNeed, Sequence

__all__ = ["Scheduler"]

DETAIL_CHUNK_TOKENS = 256
"""Prompt log-probabilities need a row of logits a token: smaller chunks bound that memory."""


class Scheduler:
    """First come, first served; decode before prefill; the youngest gives way.

    A request that waits for pages blocks those behind it, so none starves. A request whose prefix
    another one is computing right now waits for that instead of computing it again.

    While a request waits, its pages begin to come from the tiers. Once admitted it joins the batch
    when they are there; with nothing else to run, layer by layer as they come.

    Looking prompts up and finding room for them takes as long as the rest of a plan together, so
    that is done for those who come next while the device computes (:meth:`prepare`).
    """

    def __init__(self, manager: CacheManager, config: EngineConfig) -> None:
        self.manager = manager
        self._early = EarlyPages(manager)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self._prefilling: list[Sequence] = []  # running ones that will soon have cached more
        self.preemptions = 0
        self._budget = config.max_batch_prefill_tokens
        self._max_total = config.max_total_tokens
        self._max_batch = config.max_batch_size
        self._rows = list(range(config.max_batch_size))
        # Set by a preemption, cleared when pages come back for good: what was just put out must
        # not come in again to be put out in the next step.
        self._crowded = False

    # --- in and out --------------------------------------------------------------------------
    def refuse_oversize(self, num_prompt: int, max_new_tokens: int) -> None:
        """Raise ``CapacityError`` for what can never fit. The last token is never stored."""
        if num_prompt + max_new_tokens > self._max_total:
            raise CapacityError(
                f"{num_prompt} prompt tokens and {max_new_tokens} new ones are more than "
                f"max_total_tokens ({self._max_total})"
            )
        needed = num_prompt + max_new_tokens - 1
        if needed > self.manager.max_tokens:
            raise CapacityError(
                f"{num_prompt} prompt tokens and {max_new_tokens} new ones need "
                f"{self.manager.pages_for(needed)} pages of {self.manager.page_size} tokens; the "
                f"cache has {self.manager.usable_pages}. Ask for fewer, or give it more memory"
            )

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def find(self, request_id: str) -> Sequence | None:
        return next((s for s in [*self.running, *self.waiting] if s.id == request_id), None)

    def remove(self, sequence: Sequence, *, keep: bool = True) -> None:
        """It finished, failed or was aborted: let go of all it holds."""
        if sequence.row < 0:
            self.waiting.remove(sequence)
            self._early.let_go(sequence)
        else:
            self._stop_running(sequence, keep=keep)
            self._crowded = False

    def everything(self) -> list[Sequence]:
        return [*self.running, *self.waiting]

    @property
    def waits_for_tiers(self) -> bool:
        """Without a plan: there will be one when copies end, or have taken too long."""
        return self.manager.waits_for_copies or any(s.waits_for_disk for s in self.waiting)

    # --- one step ----------------------------------------------------------------------------
    def plan(self) -> Plan | None:
        """Decide the next step; ``None`` if there is nothing to do."""
        self._give_up_failed()
        unservable: list[tuple[Sequence, Exception]] = []
        decodes = list(self._decodes(unservable))
        budget, prefills = self._budget, []
        self._prefilling = [s for s in self.running if s.num_left > 1 or s.fetch is not None]
        for sequence in self.running:
            if budget and sequence.num_left > 1 and not sequence.is_arriving:
                chunk = self._chunk(sequence, budget)
                prefills.append(chunk)
                budget -= chunk.count
        admitted = self._admit(budget, decodes, prefills, unservable)
        chunks = decodes + prefills or list(self._arriving())
        self._prefetch()
        if not (chunks or admitted or unservable):
            return None
        return Plan(chunks, admitted, unservable)

    def prepare(self) -> None:
        """Once a step is issued and committed: pages that the next one needs, for running rows and
        for those who will begin.

        Those who begin leave as many pages as the rows may need, so that no row gives way to what
        only waits.
        """
        for sequence in self.running:
            if sequence.outgrows_its_pages and self.manager.available_pages:
                assert sequence.pages is not None
                self.manager.extend(sequence.pages, len(sequence.ids) + 1)
        self._admit_early()
        self._early.look_below(self.waiting)

    def flush(self, adapter_id: str | None = None) -> FlushReport:
        """See :meth:`CacheManager.flush`. Requests that wait begin without what is forgotten."""
        for sequence in self.waiting:
            if adapter_id in (None, sequence.namespace.adapter_id):
                self._early.forget(sequence)
        return self.manager.flush(adapter_id)

    def retry(self, sequence: Sequence) -> None:
        """Its pages did not come from the tiers: back to the head of the queue, to compute them."""
        self._stop_running(sequence, keep=False)
        sequence.num_computed = 0
        sequence.num_retries += 1
        self.waiting.appendleft(sequence)

    def commit(self, chunk: Chunk) -> None:
        """The chunk's K and V are in the stream.

        Those that HySparse only approximated, and those computed again that were committed before,
        do not enter the cache.
        """
        sequence = chunk.sequence
        assert sequence.pages is not None
        end = chunk.start + chunk.count
        committed = sequence.pages.num_committed_tokens
        if end > committed and (sequence.sparse is None or sequence.sparse.is_exact(end)):
            self.manager.commit(sequence.pages, sequence.ids[committed:end])
        sequence.num_computed = end

    def recompute_dense(self, sequence: Sequence) -> None:
        """Its signals crossed the bounds: from the first approximated token on, compute again.

        Where some layers no longer hold every token, all of it is computed again.
        """
        row = sequence.sparse
        assert row is not None
        assert sequence.pages is not None
        if sequence.pages.group is not None and sequence.pages.group.num_dropped_tokens:
            self._stop_running(sequence, keep=True)
            sequence.num_computed = 0
            row.recomputed()
            self.waiting.appendleft(sequence)
            return
        assert row.first_sparse is not None
        sequence.num_computed = row.first_sparse
        row.recomputed()
        if not self.manager.extend(sequence.pages, len(sequence.ids)):
            self._preempt(sequence)

    def _decodes(self, unservable: list[tuple[Sequence, Exception]]) -> Iterator[Chunk]:
        """Rows that compute one token; makes room for them, at the cost of the youngest."""
        ready = []
        for sequence in list(self.running):
            if sequence.row < 0 or sequence.num_left > 1 or sequence.is_arriving:
                continue
            if self._make_room(sequence, unservable):
                ready.append(sequence)
        for sequence in ready:
            if sequence.row >= 0:  # a later row may have put it out
                yield self._chunk(sequence, 1)

    def _make_room(self, sequence: Sequence, unservable: list[tuple[Sequence, Exception]]) -> bool:
        assert sequence.pages is not None
        while not self.manager.extend(sequence.pages, len(sequence.ids)):
            if self._early.drop_last(self.waiting):
                continue
            youngest = self.running[-1]
            if len(self.running) == 1 and not self.manager.waits_for_copies:
                # Alone, and all that may be evicted was: only pins can hold the rest.
                self.remove(sequence)
                unservable.append((sequence, _pinned()))
                return False
            self._preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._stop_running(sequence, keep=True)
        sequence.num_preemptions += 1
        sequence.num_computed = 0
        if sequence.wants_prefill_logprobs:
            sequence.prefill.clear()
        self.preemptions += 1
        self._crowded = True
        self.waiting.appendleft(sequence)

    def _stop_running(self, sequence: Sequence, *, keep: bool) -> None:
        assert sequence.pages is not None
        self.manager.release(sequence.pages, keep=keep)
        sequence.pages = None
        self.running.remove(sequence)
        self._rows.append(sequence.row)
        sequence.row = -1

    def _admit(
        self,
        budget: int,
        decodes: list[Chunk],
        prefills: list[Chunk],
        unservable: list[tuple[Sequence, Exception]],
    ) -> list[Sequence]:
        admitted: list[Sequence] = []
        deferred: list[Sequence] = []
        while self.waiting and budget and len(self.running) < self._max_batch:
            if self._crowded and self.running:
                break
            sequence = self.waiting[0]
            if self._prefix_is_on_its_way(sequence) or self._early.is_read(sequence):
                deferred.append(self.waiting.popleft())
                continue
            if not self._early.hold(sequence):
                if self._early.drop_last(self.waiting):
                    continue
                if not self.running and not self.manager.waits_for_copies:
                    # Nothing will ever come free: pins hold it.
                    unservable.append((self.waiting.popleft(), _pinned()))
                    self._early.let_go(sequence)
                    continue
                break
            self.waiting.popleft()
            self._begin(sequence)
            admitted.append(sequence)
            if not sequence.is_arriving:
                chunk = self._chunk(sequence, budget)
                budget -= chunk.count
                (decodes if chunk.count == 1 else prefills).append(chunk)
        self.waiting.extendleft(reversed(deferred))
        return admitted

    def _admit_early(self) -> None:
        """Pages for those who will begin in the next step."""
        if self._crowded:
            return
        budget = self._budget - sum(s.num_left for s in self.running if s.num_left > 1)
        rows = self._max_batch - len(self.running)
        for sequence in islice(self.waiting, rows):
            if budget <= 0:
                return
            if self._prefix_is_on_its_way(sequence) or self._early.is_read(sequence):
                continue
            if sequence.pages is None:
                wanted = self.manager.pages_for(len(sequence.ids)) + len(self.running)
                if wanted > self.manager.available_pages or not self._early.hold(sequence):
                    return
                self._prefilling.append(sequence)
            assert sequence.pages is not None
            budget -= len(sequence.ids) - sequence.pages.num_cached_tokens

    def _begin(self, sequence: Sequence) -> None:
        """From the queue into the batch."""
        assert sequence.pages is not None
        self._crowded = False
        self._early.close_promotion(sequence)
        sequence.row = self._rows.pop()
        sequence.num_computed = sequence.pages.num_cached_tokens
        if sequence.sparse is not None:
            sequence.sparse.recomputed()
        self.running.append(sequence)
        if sequence.num_left > 1 or sequence.fetch is not None:
            self._prefilling.append(sequence)
        sequence.note_cached()

    # --- from the tiers ----------------------------------------------------------------------
    def _give_up_failed(self) -> None:
        """Those whose pages will not come compute them."""
        for sequence in self.everything():
            if sequence.fetch is not None and sequence.fetch.failed:
                if sequence.row >= 0:
                    self.retry(sequence)
                else:
                    self._early.let_go(sequence)
                    sequence.num_retries += 1

    def _arriving(self) -> Iterator[Chunk]:
        """With nothing else to run: the requests whose pages are on their way, or have come since
        the others were chosen."""
        budget = self._budget
        for sequence in self.running:
            if budget and sequence.fetch is not None:
                chunk = self._chunk(sequence, budget)
                budget -= chunk.count
                yield chunk

    def _prefetch(self) -> None:
        """Let the pages of those who must wait come meanwhile, where there is room for them."""
        if not self.manager.has_tiers:
            return
        for sequence in islice(self.waiting, PREFETCH_WINDOW):
            if sequence.wants_prefill_logprobs or sequence.num_retries or sequence.sought_in_host:
                continue
            if not self._early.is_read(sequence) and not self._prefix_is_on_its_way(sequence):
                self._early.fetch(sequence)

    def _chunk(self, sequence: Sequence, budget: int) -> Chunk:
        details = sequence.wants_prefill_logprobs
        count = min(sequence.num_left, budget, DETAIL_CHUNK_TOKENS if details else budget)
        last = count == sequence.num_left
        need = LogitsNeed.ALL if details else LogitsNeed.LAST if last else LogitsNeed.NONE
        return Chunk(sequence, sequence.num_computed, count, need)

    def _prefix_is_on_its_way(self, sequence: Sequence) -> bool:
        """A running prefill will soon have cached at least a page more of this prompt."""
        if not self.manager.prefix_cache or sequence.wants_prefill_logprobs or sequence.pages:
            return False
        page = self.manager.page_size
        first_page = sequence.packed_prompt[: page * ID_BYTES]
        soon = max(
            (
                sequence.common_prompt_tokens(other)
                for other in self._prefilling
                if other.packed_prompt.startswith(first_page)
                and other.namespace == sequence.namespace
            ),
            default=0,
        )
        soon = min(soon, len(sequence.ids) - 1) // page * page
        if not soon:
            return False
        return soon > self.manager.cached_tokens(sequence.packed_prompt, sequence.namespace)


def _pinned() -> OverloadedError:
    return OverloadedError("pinned prefixes leave no room for this request; unpin some")
