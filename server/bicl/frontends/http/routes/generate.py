"""``/``, ``/generate``, ``/generate_stream``."""

from __future__ import annotations

import time

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from bicl.frontends.http.answers import (
    answer_headers,
    best_of_sequence,
    details,
    stream_headers,
    stream_responses,
)
from bicl.frontends.http.body import JsonRoute
from bicl.frontends.http.routes.common import (
    ERRORS,
    TAGS,
    Salt,
    Server,
    events_of,
    json_answer,
    list_json,
    refuse_while_draining,
    while_connected,
)
from bicl.frontends.http.schemas.generate import (
    CompatGenerateRequest,
    GenerateRequest,
    GenerateResponse,
    StreamResponse,
)
from bicl.frontends.http.server_state import ServerState
from bicl.frontends.http.sse import EventStream
from bicl.frontends.http.unsupported import refuse_unsupported

router = APIRouter(
    route_class=JsonRoute, dependencies=[Depends(refuse_while_draining)], responses=ERRORS
)


async def answer(
    server: ServerState, body: GenerateRequest, salt: str
) -> tuple[GenerateResponse, dict[str, str]]:
    """A whole answer and its headers."""
    started = time.perf_counter()
    parameters = body.parameters
    prompt = body.inputs if parameters.return_full_text else ""
    others = None
    if parameters.best_of is not None and parameters.best_of > 1:
        best, rest = await server.inference.generate_best_of(
            body, parameters.best_of, salt, started=started
        )
        others = [best_of_sequence(other, prompt) for other in rest]
    else:
        best = await server.inference.generate(body, salt, started=started)
    times = best.times(started)
    usage = best.done.usage
    server.metrics.request_succeeded(times, usage.generated_tokens)
    wanted = parameters.details or parameters.decoder_input_details
    response = GenerateResponse(
        generated_text=prompt + best.done.generated_text,
        details=details(best, others) if wanted else None,
    )
    headers = answer_headers(
        server,
        times,
        characters=len(body.inputs),
        prompt_tokens=best.valid.input_length,
        generated_tokens=usage.generated_tokens,
        cached_tokens=usage.cached_tokens,
    )
    return response, headers


def stream(server: ServerState, body: GenerateRequest, salt: str) -> Response:
    responses = stream_responses(server, body, salt, started=time.perf_counter())
    headers = stream_headers(server, len(body.inputs))
    return EventStream(events_of(server, responses), headers, server.client_left)


@router.post("/generate", response_model=GenerateResponse, tags=TAGS)
async def generate(request: Request, body: GenerateRequest, server: Server, salt: Salt) -> Response:
    """Generate tokens."""
    server.metrics.request_arrived()
    refuse_unsupported("/generate", body.parameters)

    async def call() -> Response:
        response, headers = await answer(server, body, salt)
        return json_answer(response.to_json(), headers)

    return await while_connected(request, server, call())


@router.post("/generate_stream", response_model=StreamResponse, tags=TAGS)
async def generate_stream(body: GenerateRequest, server: Server, salt: Salt) -> Response:
    """Generate a stream of tokens as server-sent events. Errors are events, too."""
    server.metrics.request_arrived()
    refuse_unsupported("/generate_stream", body.parameters)
    return stream(server, body, salt)


@router.post("/", response_model=list[GenerateResponse], tags=TAGS)
async def compat_generate(
    request: Request, body: CompatGenerateRequest, server: Server, salt: Salt
) -> Response:
    """`/generate` inside a list, or `/generate_stream` with `stream: true`."""
    server.metrics.request_arrived()
    refuse_unsupported("/", body.parameters)
    if body.parameters.return_full_text is None:
        parameters = body.parameters.model_copy(update={"return_full_text": True})
        body = body.model_copy(update={"parameters": parameters})
    if body.stream:
        return stream(server, body, salt)

    async def call() -> Response:
        response, headers = await answer(server, body, salt)
        return json_answer(list_json([response]), headers)

    return await while_connected(request, server, call())
