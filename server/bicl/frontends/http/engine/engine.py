"""The embedded server's engine: one thread that owns the model, its pages and the schedule."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future

import torch

from bicl.cache.keys import Namespace
from bicl.cache.manager import FlushReport
from bicl.cache.tiers import TierStats
from bicl.errors import BiclError, IntegrityError, InvalidInputError, OverloadedError, TransferError
from bicl.frontends.http.engine.assembly import make_manager, make_sparse_control
from bicl.frontends.http.engine.config import (
    EngineConfig,
    EngineObserver,
    EngineStats,
    Outcome,
    SparseStats,
)
from bicl.frontends.http.engine.counters import Counters, record_of
from bicl.frontends.http.engine.emitter import Emitter, Last
from bicl.frontends.http.engine.forward import Forward
from bicl.frontends.http.engine.grammar import GrammarCompiler
from bicl.frontends.http.engine.plan import Plan
from bicl.frontends.http.engine.runner import ModelRunner
from bicl.frontends.http.engine.sampler import SamplingState
from bicl.frontends.http.engine.scheduler import Scheduler
from bicl.frontends.http.engine.sequence import Sequence, check_ids
from bicl.frontends.http.engine.sizing import num_pages
from bicl.frontends.http.engine.stream import RequestStream
from bicl.frontends.http.engine.text import Detokenizer, StopCheck
from bicl.frontends.http.engine.tiers import make_tiers, measure
from bicl.frontends.http.loader import LoadedModel
from bicl.frontends.http.request import GenerationRequest, RequestFailed

__all__ = ["Engine"]

log = logging.getLogger(__name__)

MAX_FAILURES_IN_A_ROW = 3
IDLE_SECONDS = 1.0
"""Without a request before the bookkeeping is checked: nobody should wait for that."""

PATIENCE_SECONDS = 0.01
"""Between looks at deadlines, while all there is to do waits for the tiers."""


class Engine:
    """Continuous batching over BICL pages.

    All methods may be called from any thread.

    Args:
        loaded: model, tokenizer and facts, from :func:`bicl.frontends.http.loader.load_model`.
        config: limits and sizes.
        observer: told about steps, admissions and outcomes.

    Raises:
        ConfigError: the model or the sizes cannot work; the message says what would.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        *,
        observer: EngineObserver | None = None,
    ) -> None:
        self.loaded = loaded
        self.config = config
        self._observer = observer
        self._runner = ModelRunner(loaded, config, num_pages(loaded, config))
        self._tiers = make_tiers(loaded, config, self._runner, self._tiers_changed)
        manager = make_manager(loaded, config, self._runner, self._tiers)
        self._scheduler = Scheduler(manager, config)
        self._sparse = make_sparse_control(loaded, config, self._runner, manager)
        self._grammars = GrammarCompiler(loaded.tokenizer, loaded.vocab_size, loaded.eos_token_ids)
        self._emitter = Emitter(loaded.tokenizer, loaded.device)
        self._counters = Counters()
        # Bookkeeping is touched under `_lock` only; the forward step runs without it, so that
        # submit, snapshot and flush never wait for the model.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._arrivals: deque[Sequence] = deque()
        self._aborts: deque[str] = deque()
        self._live: set[str] = set()
        self._failures = 0
        self._draining = False
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._forward = Forward(self._runner, self._scheduler, self._sparse, self._lock)

    # --- from any thread ---------------------------------------------------------------------
    def start(self) -> Engine:
        """Start the loop. Returns self once it takes requests."""
        if self._runner.graphs is not None:
            self._runner.graphs.capture()
        ready: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._loop, args=(ready,), name="bicl-engine", daemon=True
        )
        self._thread.start()
        ready.result()
        return self

    def submit(self, request: GenerationRequest) -> RequestStream:
        """Queue a request. May take a second for the first grammar; run it off an event loop.

        Raises:
            CapacityError: it needs more tokens or pages than there will ever be.
            OverloadedError: ``max_waiting`` requests wait already, or the engine drains.
            InvalidInputError: its id is live already, a token id is out of range, or its grammar
                does not compile.
        """
        check_ids(request, self.loaded.vocab_size)
        self._scheduler.refuse_oversize(len(request.prompt_ids), request.params.max_new_tokens)
        params = request.params
        grammar = self._grammars.start(params.grammar) if params.grammar else None
        stream = RequestStream(request.id, self.abort)
        sequence = Sequence(
            request,
            stream,
            SamplingState(params, grammar, self.loaded.device),
            StopCheck(params, self.loaded.eos_token_ids),
            Detokenizer(self.loaded.tokenizer, request.prompt_ids),
            None if self._sparse is None else self._sparse.begin(request),
        )
        with self._changed:
            if self._stopping or self._draining:
                raise OverloadedError("the server is shutting down; try another one")
            queued = len(self._scheduler.waiting) + len(self._arrivals)
            if queued >= self.config.max_waiting:
                raise OverloadedError(
                    f"{queued} requests wait already (the limit is {self.config.max_waiting}); "
                    "try again later"
                )
            if request.id in self._live:
                raise InvalidInputError(f"request id {request.id!r} is in use")
            self._live.add(request.id)
            self._arrivals.append(sequence)
            self._changed.notify_all()
        return stream

    def abort(self, request_id: str) -> None:
        """Drop a request, queued or running; its pages are free within two steps. Its stream ends
        with :class:`RequestFailed`. Unknown and finished ids are ignored."""
        with self._changed:
            if request_id in self._live:
                self._aborts.append(request_id)
                self._changed.notify_all()

    def drain(self, timeout: float) -> bool:
        """Refuse new requests and wait until all others ended; True if that took less than
        ``timeout`` seconds."""
        with self._changed:
            self._draining = True
            return self._changed.wait_for(lambda: not self._live, timeout)

    def stop(self) -> None:
        """Fail what is left and end the thread. Idempotent."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        if self._tiers is not None:
            self._tiers.close()

    @property
    def cache_bytes(self) -> int:
        """Memory of the pages and of what HySparse keeps beside them."""
        return self._runner.cache_bytes

    def flush_cache(self, adapter_id: str | None = None) -> FlushReport:
        """Forget every cached prefix (or one adapter's), in all tiers. Requests that run go on
        undisturbed; those that wait find nothing."""
        with self._lock:
            return self._scheduler.flush(adapter_id)

    def pin(
        self, token_ids: SequenceOf[int], ttl_seconds: float | None = None, *, salt: str = ""
    ) -> int:
        """Keep the cached whole pages of a prefix; see :meth:`CacheManager.pin`. Returns its
        tokens in them."""
        with self._lock:
            return self._scheduler.manager.pin(token_ids, Namespace(salt), ttl_seconds)

    def unpin(self, token_ids: SequenceOf[int], *, salt: str = "") -> bool:
        """Take a pin off. False: these tokens had none."""
        with self._lock:
            return self._scheduler.manager.unpin(token_ids, Namespace(salt))

    def check_integrity(self) -> None:
        """Prove that every page is accounted for.

        Raises:
            IntegrityError: naming the contradiction.
        """
        with self._lock:
            self._scheduler.manager.check_integrity()

    def snapshot(self) -> EngineStats:
        """Counters and gauges, consistent with each other."""
        with self._lock:
            graphs = self._runner.graphs
            return self._counters.snapshot(
                self._scheduler,
                queued=len(self._arrivals),
                draining=self._draining,
                healthy=self._thread is not None and self._thread.is_alive(),
                graph_misses=graphs.misses if graphs is not None else 0,
                unwidened_prefills=self._runner.unwidened_prefills,
                tiers=TierStats() if self._tiers is None else self._tiers.stats(),
                sparse=SparseStats() if self._sparse is None else self._sparse.stats(),
            )

    # --- the engine's thread -----------------------------------------------------------------
    def _loop(self, ready: Future[None]) -> None:
        try:
            self._get_ready()
        except BaseException as error:  # or start() waits for ever
            ready.set_exception(error)
            return
        ready.set_result(None)
        try:
            while self._wait_for_work():
                self.step()
        except Exception:
            log.exception("the engine stopped: its device or its bookkeeping cannot be trusted")
        finally:
            with self._changed:
                self._stopping = True
                self._take_arrivals()
                for sequence in self._scheduler.everything():
                    self._fail(sequence, OverloadedError("the server stopped"))
                self._changed.notify_all()

    def _get_ready(self) -> None:
        """The tiers are measured here and not by who starts the engine: OpenMP keeps threads for
        each thread that ever computed. With more of them than cores it puts all to sleep after
        every operation, and the engine's steps wait for theirs to wake up."""
        if self.config.num_threads is not None:
            torch.set_num_threads(self.config.num_threads)
        if self._tiers is not None:
            measure(self._tiers, self.config, self._runner)
        self._runner.clock.take()  # of the steps that served nobody

    def _wait_for_work(self) -> bool:
        """Take what arrived; sleep while there is nothing. False: stop."""
        with self._changed:
            self._take_arrivals()
            patience: float | None = IDLE_SECONDS
            while not self._stopping and not self._scheduler.everything():
                self._changed.notify_all()  # drain waits for this
                if not self._changed.wait(patience) and self._books_are_sound():
                    patience = None  # once in a pause
                self._take_arrivals()
            return not self._stopping

    def _books_are_sound(self) -> bool:
        """Idle: a contradiction in the bookkeeping costs the cached prefixes, and nobody's
        request. False: begun anew, or to be as soon as copies have ended."""
        manager = self._scheduler.manager
        try:
            manager.check_integrity()
        except IntegrityError as error:
            log.error("the cache's bookkeeping contradicts itself and is begun anew: %s", error)
            if not manager.waits_for_copies:
                manager.rebuild()
            return False
        return True

    def _take_requests(self) -> None:
        while self._arrivals:
            self._scheduler.add(self._arrivals.popleft())

    def _take_arrivals(self) -> None:
        """Requests, and whom to drop; not while a step runs."""
        self._take_requests()
        while self._aborts:
            sequence = self._scheduler.find(self._aborts.popleft())
            if sequence is not None:
                error = BiclError(f"request {sequence.id} was aborted")
                self._fail(sequence, error, Outcome.ABORTED)

    @torch.inference_mode()
    def step(self) -> bool:
        """Run one step on the calling thread; False if there was nothing to do. For the loop, and
        for tests that never call :meth:`start`."""
        began = time.perf_counter()
        with self._changed:
            self._take_arrivals()
            plan = self._scheduler.plan()
            while plan is None and self._scheduler.waits_for_tiers and not self._stopping:
                self._changed.wait(PATIENCE_SECONDS)
                self._take_arrivals()
                plan = self._scheduler.plan()
            if plan is None:
                return False
            for sequence, error in plan.unservable:
                self._forget(sequence, RequestFailed(error), Outcome.FAILED)
            self._note_admissions(plan)
        if not plan.chunks:
            return True
        try:
            chunks, logits = self._forward(plan)
            forwarded = time.perf_counter()
            ready = self._emitter.choose(chunks, logits)
            # Beside the device's work, and behind the way of its tokens: pages that are saved now
            # fill that way for milliseconds.
            with self._lock:
                for chunk in chunks:
                    self._scheduler.commit(chunk)
                if self._sparse is not None:
                    self._sparse.settle(chunks)
                self._take_requests()
                self._scheduler.prepare()
            num_generated, ended = self._emitter.emit(ready)
        except Exception as error:
            if not (isinstance(error, TransferError) and self._retry(plan)):
                self._fail_batch(plan, error)
            return True
        self._failures = 0
        with self._changed:
            for sequence, last in ended:
                outcome = Outcome.FAILED if isinstance(last, RequestFailed) else Outcome.FINISHED
                self._scheduler.remove(sequence)
                self._forget(sequence, last, outcome)
            self._note_step(plan, num_generated, began, forwarded)
        return True

    def _retry(self, plan: Plan) -> bool:
        """Pages did not come from the tiers: the step counts for nobody, and who waited for them
        computes them in a later one. False: it was something else."""
        with self._lock:
            failed = [
                c.sequence for c in plan.chunks if c.sequence.fetch and c.sequence.fetch.failed
            ]
            for sequence in failed:
                log.warning("request %s: its pages did not come from the tiers", sequence.id)
                self._scheduler.retry(sequence)
        return bool(failed)

    def _fail_batch(self, plan: Plan, error: Exception) -> None:
        """A step failed: its requests fail, the others go on. A device that keeps failing will
        not recover, and the process is of no use then."""
        log.exception("a step failed", exc_info=error)
        with self._changed:
            for chunk in plan.chunks:
                self._fail(chunk.sequence, error)
        self._failures += 1
        if self._failures == MAX_FAILURES_IN_A_ROW:
            raise error

    def _tiers_changed(self) -> None:
        """On a thread of the tiers: copies ended."""
        with self._changed:
            self._changed.notify_all()

    def _fail(
        self, sequence: Sequence, error: Exception, outcome: Outcome = Outcome.FAILED
    ) -> None:
        self._scheduler.remove(sequence, keep=outcome is not Outcome.FAILED)
        self._forget(sequence, RequestFailed(error), outcome)

    def _forget(self, sequence: Sequence, last: Last, outcome: Outcome) -> None:
        self._live.discard(sequence.id)
        if self._sparse is not None:
            self._sparse.forget(sequence)
        self._counters.outcome(outcome)
        sequence.stream.put(last)
        if self._observer is not None:
            self._observer.on_outcome(outcome)
        if not self._live:
            self._changed.notify_all()

    def _note_admissions(self, plan: Plan) -> None:
        now, running = time.monotonic(), len(self._scheduler.running)
        for sequence in plan.admitted:
            self._runner.admit(sequence)
            if sequence.admitted is None:
                sequence.admitted = now
                if self._observer is not None:
                    self._observer.on_admitted(now - sequence.arrived, running)

    def _note_step(self, plan: Plan, num_generated: int, began: float, forwarded: float) -> None:
        stored = self._runner.clock.take()
        record = record_of(plan, num_generated, began, forwarded, stored)
        self._counters.step(record)
        if self._observer is not None:
            self._observer.on_step(record)
