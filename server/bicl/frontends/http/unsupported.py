"""The one list of request fields that are refused, and why. ``/info`` and the README show it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bicl.frontends.http.errors import validation_error
from bicl.frontends.http.schemas.base import Wire

__all__ = ["UNSUPPORTED", "Unsupported", "refuse_images", "refuse_unsupported"]


@dataclass(frozen=True)
class Unsupported:
    """A field that must keep one of its neutral values.

    Attributes:
        field: its name in the request.
        routes: where it may appear.
        reason: what to do instead.
        neutral: whether a value asks for nothing.
    """

    field: str
    routes: tuple[str, ...]
    reason: str
    neutral: Callable[[Any], bool]


_GENERATE = ("/", "/generate", "/generate_stream")
_OPENAI = ("/v1/chat/completions", "/v1/completions")

UNSUPPORTED = (
    Unsupported("adapter_id", _GENERATE, "no adapters are loaded", lambda v: v is None),
    Unsupported("n", _OPENAI, "send the request n times", lambda v: v in (None, 1)),
    Unsupported("logit_bias", _OPENAI, "leave it out", lambda v: not v),
    Unsupported("best_of", _OPENAI[1:], "use /generate", lambda v: v in (None, 1)),
    Unsupported("echo", _OPENAI[1:], "prepend the prompt yourself", lambda v: not v),
    Unsupported("logprobs", _OPENAI[1:], "use /v1/chat/completions", lambda v: v is None),
    Unsupported("presence_penalty", _OPENAI[1:], "use repetition_penalty", lambda v: not v),
)
IMAGES = "image modality is not supported"


def refuse_unsupported(route: str, request: Wire) -> None:
    """Raise a 422 that names the first field whose value this server cannot honour."""
    for item in UNSUPPORTED:
        if route in item.routes:
            value = getattr(request, item.field, None)
            if not item.neutral(value):
                raise validation_error(f"`{item.field}` is not supported: {item.reason}")


def refuse_images() -> None:
    raise validation_error(IMAGES)
