"""Request bodies, refused with axum's statuses and plain-text answers.

415 without a JSON content type, 413 above the payload limit, 400 for text that is no JSON, 422 for
JSON of another shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine
from email.message import Message
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json

__all__ = ["BodyError", "JsonRoute", "answer_body_error", "answer_wrong_shape"]

MALFORMED = "Failed to parse the request body as JSON: "
WRONG_SHAPE = "Failed to deserialize the JSON body into the target type: "


class BodyError(Exception):
    """A body that never became a request."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


class _JsonRequest(Request):
    _json: Any

    async def load(self) -> None:
        if not _is_json(self.headers.get("content-type", "")):
            raise BodyError(415, "Expected request with `Content-Type: application/json`")
        limit: int = self.app.state.server.config.payload_limit
        self._body = await self._read(limit)
        try:
            self._json = from_json(self._body, allow_inf_nan=False)
        except ValueError as error:
            raise BodyError(400, f"{MALFORMED}{error}") from None
        if _overflows(self._json):
            raise BodyError(400, f"{MALFORMED}number out of range")

    async def _read(self, limit: int) -> bytes:
        body = bytearray()
        too_long = BodyError(413, "Failed to buffer the request body: length limit exceeded")
        if int(self.headers.get("content-length") or 0) > limit:
            raise too_long
        async for chunk in self.stream():
            body += chunk
            if len(body) > limit:
                raise too_long
        return bytes(body)


class JsonRoute(APIRoute):
    """A route whose body is read by the rules above."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        inner = super().get_route_handler()
        if self.body_field is None:
            return inner

        async def handle(request: Request) -> Response:
            wrapped = _JsonRequest(request.scope, request.receive)
            await wrapped.load()
            return await inner(wrapped)

        return handle


def answer_body_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, BodyError)
    return PlainTextResponse(error.text, error.status)


def answer_wrong_shape(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    path = ".".join(str(part) for part in first["loc"][1:])
    text = first["msg"].removeprefix("Value error, ")
    return PlainTextResponse(f"{WRONG_SHAPE}{path}: {text}" if path else WRONG_SHAPE + text, 422)


def _overflows(value: Any) -> bool:
    """Whether a number such as 1e400 became infinite; serde refuses it as it reads."""
    if isinstance(value, float):
        return value in (math.inf, -math.inf)
    if isinstance(value, dict):
        return any(_overflows(each) for each in value.values())
    return isinstance(value, list) and any(_overflows(each) for each in value)


def _is_json(content_type: str) -> bool:
    message = Message()
    message["content-type"] = content_type
    subtype = message.get_content_subtype()
    json = subtype == "json" or subtype.endswith("+json")
    return message.get_content_maintype() == "application" and json
