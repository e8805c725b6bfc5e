"""What the routes share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from enum import Enum
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request
from starlette.responses import Response

from bicl.frontends.http.errors import WireError, draining, validation_error
from bicl.frontends.http.schemas.base import ErrorResponse, Wire
from bicl.frontends.http.schemas.generate import StreamResponse
from bicl.frontends.http.server_state import ServerState
from bicl.frontends.http.sse import data

__all__ = ["ERRORS", "TAGS", "Salt", "Server", "events_of", "json_answer", "while_connected"]

T = TypeVar("T")

TAGS: list[str | Enum] = ["Text Generation Inference"]
SALT_HEADER = "x-bicl-cache-salt"
MAX_SALT_CHARACTERS = 256
CLIENT_CLOSED_REQUEST = 499

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse, "description": text}
    for status, text in (
        (422, "Input validation error"),
        (424, "Generation error"),
        (429, "Model is overloaded"),
        (500, "Incomplete generation"),
        (503, "The server is shutting down"),
    )
}


def _server(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


def _salt(request: Request) -> str:
    """Tenant salt: from the gateway's header only, never from the body that a tenant writes."""
    salt = request.headers.get(SALT_HEADER, "")
    if len(salt) > MAX_SALT_CHARACTERS:
        raise validation_error(
            f"header {SALT_HEADER} has {len(salt)} characters; at most {MAX_SALT_CHARACTERS} fit"
        )
    return salt


def refuse_while_draining(request: Request) -> None:
    """Streams are answered 200 whatever happens inside, so this must be told before."""
    if _server(request).inference.draining:
        raise draining()


Server = Annotated[ServerState, Depends(_server)]
Salt = Annotated[str, Depends(_salt)]


def json_answer(body: bytes, headers: Mapping[str, str] | None = None) -> Response:
    return Response(body, headers=dict(headers or {}), media_type="application/json")


def list_json(items: list[Any]) -> bytes:
    return b"[" + b",".join(item.to_json() for item in items) + b"]"


async def while_connected(
    request: Request, server: ServerState, call: Coroutine[Any, Any, T]
) -> T | Response:
    """``call``'s result; if the client leaves first, ``call`` is cancelled, and with it its
    requests."""
    task = asyncio.ensure_future(call)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        server.client_left()
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def events_of(
    server: ServerState, responses: AsyncGenerator[StreamResponse, None]
) -> AsyncGenerator[bytes, None]:
    """TGI's events: one a token; an error becomes the last one."""
    async with aclosing(responses):
        try:
            async for response in responses:
                yield data(response.to_json())
        except WireError as error:
            server.request_failed(error)
            yield data(error.to_json())


def openai_error(server: ServerState, error: WireError) -> bytes:
    """TGI reports every error inside an OpenAI stream with this one status."""
    server.request_failed(error)
    return data(_OpenAIError(error=_ApiError(message=error.error)).to_json())


class _ApiError(Wire):
    message: str
    http_status_code: int = 422


class _OpenAIError(Wire):
    error: _ApiError
