"""The OpenAPI document: FastAPI's, and what the streams consist of."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from bicl.frontends.http.schemas.base import Wire
from bicl.frontends.http.schemas.chat import ChatCompletionChunk
from bicl.frontends.http.schemas.completions import Chunk
from bicl.frontends.http.schemas.generate import StreamResponse

__all__ = ["describe_streams"]

STREAMS: dict[str, type[Wire]] = {
    "/": StreamResponse,
    "/generate_stream": StreamResponse,
    "/v1/chat/completions": ChatCompletionChunk,
    "/v1/completions": Chunk,
}
ONLY_STREAMS = {"/generate_stream"}


def describe_streams(app: FastAPI) -> None:
    """Add the events' schemas to ``app``'s document when it is first asked for."""
    build = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            _add_streams(build())
        return build()

    app.openapi = openapi  # type: ignore[method-assign]


def _add_streams(document: dict[str, Any]) -> None:
    _, definitions = models_json_schema(
        [(model, "serialization") for model in STREAMS.values()],
        ref_template="#/components/schemas/{model}",
    )
    for name, schema in definitions["$defs"].items():
        document["components"]["schemas"].setdefault(name, schema)
    for route, model in STREAMS.items():
        content = document["paths"][route]["post"]["responses"]["200"]["content"]
        if route in ONLY_STREAMS:
            content.clear()
        reference = {"$ref": f"#/components/schemas/{model.__name__}"}
        content["text/event-stream"] = {"schema": reference}
