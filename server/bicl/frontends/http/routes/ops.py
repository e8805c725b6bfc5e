"""``/tokenize``, and what operators ask: health, readiness, info, models, metrics."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from bicl.frontends.http.body import JsonRoute
from bicl.frontends.http.errors import WireError
from bicl.frontends.http.routes.common import TAGS, Server, json_answer, list_json
from bicl.frontends.http.schemas.base import ErrorResponse
from bicl.frontends.http.schemas.generate import GenerateRequest, SimpleToken
from bicl.frontends.http.schemas.ops import FlushedCache, Info, ModelInfo, ModelsInfo
from bicl.frontends.http.tokenization import simple_tokens
from bicl.metrics import CONTENT_TYPE

DOWN: dict[int | str, dict[str, Any]] = {503: {"model": ErrorResponse}}
tokenize_router = APIRouter(route_class=JsonRoute)
cache_router = APIRouter()
router = APIRouter()


@tokenize_router.post("/tokenize", response_model=list[SimpleToken], tags=TAGS)
async def tokenize(body: GenerateRequest, server: Server) -> Response:
    """Token ids of `inputs`, with their place in its UTF-8 bytes."""
    encoding = await server.tokenizer.encode(body.inputs, add_special_tokens=True)
    return json_answer(list_json(simple_tokens(encoding, body.inputs)))


@cache_router.post("/cache/flush", tags=TAGS)
async def flush_cache(server: Server) -> FlushedCache:
    """Forget every cached prefix, in host memory and on disk, too. Requests that run go on."""
    report = await asyncio.to_thread(server.inference.engine.flush_cache)
    return FlushedCache(
        freed_pages=report.freed_pages,
        held_pages=report.orphaned_pages,
        dropped_pins=report.dropped_pins,
        tier_pages=report.tier_pages,
    )


@router.get("/health", responses=DOWN, tags=TAGS)
@router.get("/ping", responses=DOWN, tags=TAGS, include_in_schema=False)
@router.get("/", responses=DOWN, tags=TAGS, include_in_schema=False)
async def health(server: Server) -> Response:
    """Liveness: 200 while the engine runs, however busy it is, and while it drains."""
    if not server.alive:
        raise WireError(503, "unhealthy", "healthcheck")
    return Response()


@router.get("/ready", responses=DOWN, tags=TAGS)
async def ready(server: Server) -> Response:
    """Readiness: 503 while draining, or while every permit is taken."""
    if not server.ready:
        raise WireError(503, "not ready", "readiness")
    return Response()


@router.get("/info", tags=TAGS)
async def info(server: Server) -> Info:
    """The served model, its limits and (`bicl`) its cache."""
    stats = server.inference.engine.snapshot()
    known = server.info.bicl
    now = {
        "reordering_exposed": stats.reordering_exposed,
        "fallbacks": [*known.fallbacks, *stats.fallbacks],
    }
    return server.info.model_copy(update={"bicl": known.model_copy(update=now)})


@router.get("/v1/models", tags=TAGS)
async def models(server: Server) -> ModelsInfo:
    """The served model in OpenAI's words."""
    name = server.info.model_id
    return ModelsInfo(data=[ModelInfo(id=name, owned_by=name)])


@router.get("/metrics", tags=TAGS)
async def metrics(server: Server) -> Response:
    """Prometheus' text format."""
    return Response(server.metrics.render(), media_type=CONTENT_TYPE)


# axum answers HEAD wherever it answers GET; load balancers probe with it.
for path, handler in (
    ("/health", health),
    ("/ping", health),
    ("/", health),
    ("/ready", ready),
    ("/info", info),
    ("/v1/models", models),
    ("/metrics", metrics),
):
    router.add_api_route(path, handler, methods=["HEAD"], include_in_schema=False)
