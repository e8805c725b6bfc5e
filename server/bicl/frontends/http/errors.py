"""Errors as TGI puts them on the wire, and how ours map onto them."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import Response

from bicl.errors import BiclError, CapacityError, InvalidInputError, OverloadedError
from bicl.frontends.http.schemas.base import ErrorResponse

__all__ = ["WireError", "answer_wire_error", "from_engine", "validation_error"]


class WireError(Exception):
    """An answer ``{"error": ..., "error_type": ...}`` with its status.

    ``metric`` is the ``err`` label under which ``tgi_request_failure`` counts it, if any.
    """

    def __init__(self, status: int, error: str, error_type: str, metric: str | None = None) -> None:
        super().__init__(error)
        self.status = status
        self.error = error
        self.error_type = error_type
        self.metric = metric

    def to_json(self) -> bytes:
        return ErrorResponse(error=self.error, error_type=self.error_type).to_json()


def validation_error(message: str) -> WireError:
    return WireError(422, f"Input validation error: {message}", "validation", "validation")


def overloaded() -> WireError:
    return WireError(429, "Model is overloaded", "overloaded", "overloaded")


def draining() -> WireError:
    return WireError(503, "The server is shutting down", "shutting_down", "shutting_down")


def incomplete(stream: bool) -> WireError:
    if stream:
        return WireError(
            500, "Incomplete generation stream", "incomplete_generation_stream", "incomplete"
        )
    return WireError(500, "Incomplete generation", "incomplete_generation", "incomplete")


def tool_error(message: str) -> WireError:
    return WireError(422, f"Tool error: {message}", "tool_error")


def template_error(message: str) -> WireError:
    return WireError(422, f"Template error: {message}", "template_error", "template")


def from_engine(error: BiclError) -> WireError:
    """What the client is told when the engine does not take a request."""
    if isinstance(error, CapacityError | InvalidInputError):
        return validation_error(str(error))
    if isinstance(error, OverloadedError):
        return overloaded()
    return generation_error(error)


def generation_error(error: Exception) -> WireError:
    """What the client is told when a running request fails."""
    return WireError(424, f"Request failed during generation: {error}", "generation", "generation")


def answer_wire_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, WireError)
    request.app.state.server.request_failed(error)
    return Response(error.to_json(), error.status, media_type="application/json")
