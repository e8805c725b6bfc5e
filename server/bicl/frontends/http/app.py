"""The FastAPI application: routes, errors, access."""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from bicl.frontends.http.body import BodyError, answer_body_error, answer_wrong_shape
from bicl.frontends.http.errors import WireError, answer_wire_error
from bicl.frontends.http.openapi import describe_streams
from bicl.frontends.http.routes import chat, cloud, completions, generate, ops, pins
from bicl.frontends.http.server_state import WIRE_VERSION, ServerState

__all__ = ["create_app"]

DESCRIPTION = (
    f"Text generation on a KV cache of BICL tiles, with the wire format of "
    f"text-generation-inference {WIRE_VERSION}."
)


def create_app(server: ServerState) -> FastAPI:
    """The application that serves ``server``."""
    app = FastAPI(
        title="BICL",
        description=DESCRIPTION,
        version=WIRE_VERSION,
        docs_url="/docs",
        redoc_url=None,
        openapi_url="/api-doc/openapi.json",
        lifespan=_lifespan,
        redirect_slashes=False,
    )
    app.state.server = server
    guarded = [Depends(_require_key)] if server.config.api_key else []
    guarded_routers = (
        generate.router,
        chat.router,
        completions.router,
        cloud.router,
        ops.tokenize_router,
        ops.cache_router,
        pins.router,
    )
    for router in guarded_routers:
        app.include_router(router, dependencies=guarded)
    app.include_router(chat.tokenize_router)
    app.include_router(ops.router)
    describe_streams(app)
    app.add_exception_handler(WireError, answer_wire_error)
    app.add_exception_handler(BodyError, answer_body_error)
    app.add_exception_handler(RequestValidationError, answer_wrong_shape)
    app.add_exception_handler(HTTPException, _answer_bare)
    origins = server.config.cors_allow_origin
    app.add_middleware(
        CORSMiddleware,
        allow_origins=["*"] if origins is None else [each.strip() for each in origins.split(",")],
        allow_methods=["GET", "POST"],
        allow_headers=["content-type"],
    )
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield
    app.state.server.tokenizer.close()


def _require_key(request: Request) -> None:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    expected = request.app.state.server.config.api_key
    if scheme.lower() != "bearer" or not hmac.compare_digest(key.encode(), expected.encode()):
        raise HTTPException(401)


def _answer_bare(_: Request, error: Exception) -> Response:
    """404, 405 and 401 have no body in TGI."""
    assert isinstance(error, HTTPException)
    return Response(status_code=error.status_code, headers=error.headers)
