"""One request's events on their way from the engine's thread to whoever waits for them."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator

from bicl.frontends.http.request import RequestDone, RequestEvent, RequestFailed

__all__ = ["RequestStream"]


class RequestStream:
    """Events of one request, in order; ends after :class:`RequestDone` or :class:`RequestFailed`.

    ``async for event in stream`` from any asyncio loop, or ``for event in stream`` from any
    thread; one consumer. A consumer that stops early calls :meth:`close` (``aclose`` of an async
    generator around it is a good place), which aborts the request.
    """

    def __init__(self, request_id: str, abort: Callable[[str], None]) -> None:
        self.request_id = request_id
        self._abort = abort
        self._events: deque[RequestEvent] = deque()
        self._changed = threading.Condition()
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._ended = False

    def put(self, event: RequestEvent) -> None:
        """Append an event (engine's side; never blocks)."""
        with self._changed:
            self._events.append(event)
            self._changed.notify()
            waiter = self._waiter
        if waiter is not None:
            loop, flag = waiter
            try:
                loop.call_soon_threadsafe(flag.set)
            except RuntimeError:  # the consumer's loop is closed: nobody is left to tell
                self._waiter = None

    def close(self) -> None:
        """Stop early: abort the request unless its last event was consumed. Idempotent."""
        if not self._ended:
            self._ended = True
            self._abort(self.request_id)

    def _take(self) -> RequestEvent:
        event = self._events.popleft()
        if isinstance(event, RequestDone | RequestFailed):
            self._ended = True
        return event

    def __iter__(self) -> Iterator[RequestEvent]:
        return self

    def __next__(self) -> RequestEvent:
        if self._ended:
            raise StopIteration
        with self._changed:
            self._changed.wait_for(lambda: self._events)
            return self._take()

    def __aiter__(self) -> AsyncIterator[RequestEvent]:
        return self

    async def __anext__(self) -> RequestEvent:
        if self._ended:
            raise StopAsyncIteration
        while True:
            with self._changed:
                if self._events:
                    return self._take()
                loop = asyncio.get_running_loop()
                if self._waiter is None or self._waiter[0] is not loop:
                    self._waiter = (loop, asyncio.Event())
                flag = self._waiter[1]
                flag.clear()
            await flag.wait()
