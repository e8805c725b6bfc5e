"""One request from validated JSON to its last event: permits, engine, times, failures."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from bicl.cache.stats import FlushReport
from bicl.errors import BiclError
from bicl.frontends.http.engine.config import EngineStats
from bicl.frontends.http.errors import (
    draining,
    from_engine,
    generation_error,
    incomplete,
    overloaded,
)
from bicl.frontends.http.request import (
    GenerationRequest,
    RequestDone,
    RequestEvent,
    RequestFailed,
    TokenEvent,
)
from bicl.frontends.http.schemas.generate import GenerateRequest
from bicl.frontends.http.validation import Validator, ValidRequest
from bicl.metrics import RequestTimes, ServerMetrics

__all__ = ["Generated", "Generation", "Inference", "Step"]

T = TypeVar("T")


class EventStreamLike(Protocol):
    """What :class:`~bicl.frontends.http.engine.RequestStream` offers the routes."""

    def __aiter__(self) -> AsyncIterator[RequestEvent]: ...

    def close(self) -> None: ...


class EngineLike(Protocol):
    """What :class:`~bicl.frontends.http.engine.Engine` offers the routes."""

    def submit(self, request: GenerationRequest) -> EventStreamLike: ...

    def drain(self, timeout: float) -> bool: ...

    def stop(self) -> None: ...

    def flush_cache(self) -> FlushReport: ...

    def pin(
        self, token_ids: Sequence[int], ttl_seconds: float | None = None, *, salt: str = ""
    ) -> int: ...

    def unpin(self, token_ids: Sequence[int], *, salt: str = "") -> bool: ...

    def snapshot(self) -> EngineStats: ...


@dataclass(frozen=True)
class Step:
    """One generated token; ``done`` comes with the last."""

    index: int
    event: TokenEvent
    done: RequestDone | None = None


@dataclass(frozen=True)
class Generated:
    """A whole answer."""

    valid: ValidRequest
    events: tuple[TokenEvent, ...]
    done: RequestDone
    validation_time: float

    @property
    def mean_logprob(self) -> float:
        return sum(event.token.logprob for event in self.events) / len(self.events)

    def times(self, started: float) -> RequestTimes:
        return request_times(started, self.validation_time, self.done)


def request_times(started: float, validation_time: float, done: RequestDone) -> RequestTimes:
    """Times of a request that arrived at ``started`` (``time.perf_counter``) and ends now."""
    usage = done.usage
    return RequestTimes(
        total=time.perf_counter() - started,
        validation=validation_time,
        queue=usage.queue_time,
        inference=usage.inference_time,
        per_token=usage.inference_time / max(1, usage.generated_tokens),
    )


class Generation:
    """A request in the engine. Iterate :meth:`steps`; closing that generator aborts the request."""

    def __init__(
        self,
        owner: Inference,
        valid: ValidRequest,
        stream: EventStreamLike,
        started: float,
    ) -> None:
        self.valid = valid
        self.validation_time = time.perf_counter() - started
        self._owner = owner
        self._stream = stream
        self._started = started

    async def steps(self) -> AsyncGenerator[Step, None]:
        """Tokens in order.

        Raises:
            WireError: the request failed.
        """
        metrics = self._owner.metrics
        try:
            index = 0
            last: TokenEvent | None = None
            async for event in self._stream:
                if isinstance(event, TokenEvent):
                    index += 1
                    if index == 1:
                        metrics.first_token(time.perf_counter() - self._started)
                    last = event
                    if not event.last:
                        yield Step(index, event)
                elif isinstance(event, RequestDone) and last is not None and last.last:
                    yield Step(index, last, event)
                    return
                elif isinstance(event, RequestFailed):
                    raise generation_error(event.error)
            raise incomplete(stream=True)
        finally:
            self._stream.close()
            self._owner.release()


class Inference:
    """The routes' way to the engine.

    Args:
        engine: see :class:`EngineLike`.
        max_concurrent_requests: permits; a request beyond them is refused, as in TGI before it is
            even validated.
    """

    def __init__(
        self,
        engine: EngineLike,
        validator: Validator,
        metrics: ServerMetrics,
        max_concurrent_requests: int,
    ) -> None:
        self.engine = engine
        self.validator = validator
        self.metrics = metrics
        self.draining = False
        self._permits = max_concurrent_requests

    @property
    def saturated(self) -> bool:
        return self._permits == 0

    def release(self) -> None:
        self._permits += 1

    async def start(
        self,
        request: GenerateRequest,
        salt: str,
        *,
        add_special_tokens: bool = True,
        started: float,
    ) -> Generation:
        """Validate and submit.

        Raises:
            WireError: refused; nothing was allocated.
        """
        if self.draining:
            raise draining()
        if self._permits <= 0:
            raise overloaded()
        self._permits -= 1
        try:
            valid = await self.validator.validate(request, add_special_tokens)
            self.metrics.request_validated(valid.input_length, valid.params.max_new_tokens)
            stream = await self._submit(valid, salt)
        except BaseException:
            self.release()
            raise
        return Generation(self, valid, stream, started)

    async def _submit(self, valid: ValidRequest, salt: str) -> EventStreamLike:
        request = GenerationRequest(
            id=uuid.uuid4().hex, prompt_ids=valid.prompt_ids, params=valid.params, salt=salt
        )
        try:
            if not valid.slow_to_submit:
                return self.engine.submit(request)
            return await self._submit_elsewhere(request)
        except BiclError as error:
            raise from_engine(error) from error

    async def _submit_elsewhere(self, request: GenerationRequest) -> EventStreamLike:
        """On a thread: a grammar may take a second to compile, a long prompt a while to parse."""
        loop = asyncio.get_running_loop()
        submitted = loop.run_in_executor(None, self.engine.submit, request)
        try:
            return await asyncio.shield(submitted)
        except asyncio.CancelledError:  # the client left meanwhile: nobody will read the stream
            submitted.add_done_callback(_close_unread)
            raise

    async def generate(
        self,
        request: GenerateRequest,
        salt: str,
        *,
        add_special_tokens: bool = True,
        started: float,
    ) -> Generated:
        """The whole answer. Cancelling this call aborts the request."""
        generation = await self.start(
            request, salt, add_special_tokens=add_special_tokens, started=started
        )
        steps = generation.steps()
        events: list[TokenEvent] = []
        try:
            async for step in steps:
                events.append(step.event)
                if step.done is not None:
                    return Generated(
                        generation.valid, tuple(events), step.done, generation.validation_time
                    )
        finally:
            await steps.aclose()
        raise incomplete(stream=False)

    async def generate_best_of(
        self, request: GenerateRequest, best_of: int, salt: str, *, started: float
    ) -> tuple[Generated, list[Generated]]:
        """``best_of`` answers: the one with the highest mean log-probability, and the others."""
        self.validator.check_best_of(best_of)
        answers = await all_or_none(
            [self.generate(request, salt, started=started) for _ in range(best_of)]
        )
        best = max(range(best_of), key=lambda index: answers[index].mean_logprob)
        return answers[best], answers[:best] + answers[best + 1 :]


def _close_unread(submitted: asyncio.Future[EventStreamLike]) -> None:
    if not submitted.cancelled() and submitted.exception() is None:
        submitted.result().close()


async def all_or_none(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of concurrent calls in order; the first failure cancels the others and is raised."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
