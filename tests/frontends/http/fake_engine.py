"""A deterministic engine without a model: it repeats the prompt's tokens, one a tick."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from bicl.cache.stats import FlushReport
from bicl.errors import CapacityError, InvalidInputError, OverloadedError
from bicl.frontends.http.engine.config import EngineStats
from bicl.frontends.http.engine.stream import RequestStream
from bicl.frontends.http.request import (
    FinishReason,
    GenerationRequest,
    PrefillToken,
    RequestDone,
    RequestFailed,
    Token,
    TokenEvent,
    Usage,
)


@dataclass
class _Running:
    request: GenerationRequest
    stream: RequestStream
    produced: list[int] = field(default_factory=list)


class FakeEngine:
    """Speaks the engine's interface.

    Args:
        decode: token ids to text.
        tick: seconds between tokens; 0 produces a whole answer inside ``submit``.
        capacity: longest prompt plus output.
        script: token ids to produce instead of the prompt's.
    """

    def __init__(self, decode, tick: float = 0.0, capacity: int = 1 << 30, script=None) -> None:
        self._decode = decode
        self._tick = tick
        self._capacity = capacity
        self._script = script
        self._lock = threading.Lock()
        self._running: dict[str, _Running] = {}
        self.unwidened_prefills = 0
        self._counts = dict.fromkeys(("finished", "aborted", "failed", "generated_tokens"), 0)
        self._stopped = threading.Event()
        self.requests: list[GenerationRequest] = []
        self.cached_tokens = 0
        self.cached_host_tokens = 0
        self.flushes = 0
        self.pins: dict[tuple[tuple[int, ...], str], float | None] = {}
        self.draining = False
        self.healthy = True
        self.fail_with: Exception | None = None
        self.refuse_with: Exception | None = None
        if tick:
            threading.Thread(target=self._loop, daemon=True).start()

    def submit(self, request: GenerationRequest) -> RequestStream:
        if self.draining:
            raise OverloadedError("the engine drains")
        if self.refuse_with is not None:
            raise self.refuse_with
        if len(request.prompt_ids) + request.params.max_new_tokens > self._capacity:
            raise CapacityError(f"needs more than {self._capacity} tokens")
        if request.params.grammar is not None and request.params.grammar.value == "(":
            raise InvalidInputError("grammar does not compile")
        stream = RequestStream(request.id, self.abort)
        running = _Running(request, stream)
        with self._lock:
            self.requests.append(request)
            self._running[request.id] = running
        if not self._tick:
            while request.id in self._running:
                self._step(running)
        return stream

    def abort(self, request_id: str) -> None:
        with self._lock:
            if self._running.pop(request_id, None) is not None:
                self._counts["aborted"] += 1

    def drain(self, timeout: float) -> bool:
        self.draining = True
        end = time.monotonic() + timeout
        while self._running and time.monotonic() < end:
            time.sleep(0.005)
        return not self._running

    def stop(self) -> None:
        self._stopped.set()
        with self._lock:
            running, self._running = list(self._running.values()), {}
        for each in running:
            each.stream.put(RequestFailed(RuntimeError("the engine stopped")))

    def flush_cache(self) -> FlushReport:
        self.flushes += 1
        return FlushReport(freed_pages=3, orphaned_pages=1, dropped_pins=0, tier_pages=7)

    def pin(self, token_ids, ttl_seconds=None, *, salt="") -> int:
        if ttl_seconds == 13.0:
            raise CapacityError("pinning 1 pages would protect 9 of at most 8; unpin others")
        self.pins[tuple(token_ids), salt] = ttl_seconds
        return len(token_ids) // 2

    def unpin(self, token_ids, *, salt="") -> bool:
        return self.pins.pop((tuple(token_ids), salt), 0) != 0

    def snapshot(self) -> EngineStats:
        with self._lock:
            in_use = len(self._running)
            return EngineStats(
                batch_size=in_use,
                pages_total=16,
                pages_free=16 - in_use,
                pages_in_use=in_use,
                queried_tokens=10 * len(self.requests),
                hit_tokens=self.cached_tokens * len(self.requests),
                unwidened_prefills=self.unwidened_prefills,
                draining=self.draining,
                healthy=self.healthy,
                **self._counts,
            )

    def _loop(self) -> None:
        while not self._stopped.wait(self._tick):
            for running in list(self._running.values()):
                self._step(running)

    def _step(self, running: _Running) -> None:
        request, params = running.request, running.request.params
        if self.fail_with is not None:
            self._end(request.id, "failed")
            running.stream.put(RequestFailed(self.fail_with))
            return
        source = self._script or request.prompt_ids
        token = source[len(running.produced) % len(source)]
        running.produced.append(token)
        done = len(running.produced) >= (
            min(params.max_new_tokens, len(self._script)) if self._script else params.max_new_tokens
        )
        tops = tuple(self._token(token, -0.25 - rank) for rank in range(params.top_n_tokens))
        event = TokenEvent(self._token(token, -0.1), tops, last=done)
        with self._lock:
            self._counts["generated_tokens"] += 1
        if done:
            self._end(request.id, "finished")
        running.stream.put(event)
        if done:
            running.stream.put(self._done(running))

    def _end(self, request_id: str, outcome: str) -> None:
        with self._lock:
            self._running.pop(request_id, None)
            self._counts[outcome] += 1

    def _token(self, token: int, logprob: float) -> Token:
        return Token(id=token, text=self._decode([token]), logprob=logprob, special=False)

    def _done(self, running: _Running) -> RequestDone:
        request = running.request
        prefill = ()
        if request.params.decoder_input_details:
            prefill = tuple(
                PrefillToken(token, self._decode([token]), None if index == 0 else -0.5)
                for index, token in enumerate(request.prompt_ids)
            )
        usage = Usage(
            prompt_tokens=len(request.prompt_ids),
            generated_tokens=len(running.produced),
            cached_tokens=self.cached_tokens,
            cached_host_tokens=self.cached_host_tokens,
            queue_time=0.001,
            inference_time=0.002,
        )
        text = self._decode(running.produced)
        return RequestDone(FinishReason.LENGTH, text, usage, prefill)
