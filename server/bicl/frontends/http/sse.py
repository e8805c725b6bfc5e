"""Server-sent events with axum's bytes: ``data: {...}\\n\\n``, and ``:\\n\\n`` to keep alive."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

__all__ = ["DONE", "EventStream", "data"]

KEEP_ALIVE_SECONDS = 15.0


def data(payload: bytes) -> bytes:
    """One event."""
    return b"data: " + payload + b"\n\n"


DONE = data(b"[DONE]")


class EventStream(Response):
    """Streams events until their generator ends or the client leaves.

    Whichever comes first, the generator is closed before the response returns: what it holds (a
    request's pages) is free again even if the client left while nothing was being sent.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        headers: Mapping[str, str],
        on_disconnect: Callable[[], None],
    ) -> None:
        self.events = events
        self.on_disconnect = on_disconnect
        self._last_sent = time.monotonic()
        self.status_code = 200
        self.background = None
        fixed = {"content-type": self.media_type, "cache-control": "no-cache"}
        self.init_headers({**fixed, **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = asyncio.ensure_future(self._send_events(send))
        leaver = asyncio.ensure_future(_until_disconnect(receive))
        waker = asyncio.ensure_future(self._keep_alive(send))
        try:
            await asyncio.wait({sender, leaver}, return_when=asyncio.FIRST_COMPLETED)
            if not sender.done():
                self.on_disconnect()
        finally:
            for task in (sender, leaver, waker):
                task.cancel()
            await asyncio.gather(sender, leaver, waker, return_exceptions=True)
            await self.events.aclose()
        if not sender.cancelled() and (error := sender.exception()) is not None:
            raise error

    async def _send_events(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async for chunk in self.events:
            self._last_sent = time.monotonic()
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        """A comment whenever nothing was sent for a while. The headers went out long before."""
        while True:
            silence = time.monotonic() - self._last_sent
            if silence < KEEP_ALIVE_SECONDS:
                await asyncio.sleep(KEEP_ALIVE_SECONDS - silence)
                continue
            self._last_sent = time.monotonic()
            await send({"type": "http.response.body", "body": b":\n\n", "more_body": True})


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
