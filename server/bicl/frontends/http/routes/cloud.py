"""``/invocations`` (SageMaker) and ``/vertex``: the other routes under a cloud's name."""

from __future__ import annotations

import time

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from bicl.frontends.http.body import JsonRoute
from bicl.frontends.http.chat import to_generate
from bicl.frontends.http.errors import WireError
from bicl.frontends.http.inference import all_or_none
from bicl.frontends.http.routes.chat import chat_completions
from bicl.frontends.http.routes.common import (
    ERRORS,
    TAGS,
    Salt,
    Server,
    json_answer,
    refuse_while_draining,
    while_connected,
)
from bicl.frontends.http.routes.completions import completions
from bicl.frontends.http.routes.generate import compat_generate
from bicl.frontends.http.schemas.chat import ChatRequest
from bicl.frontends.http.schemas.cloud import VertexGenerate, VertexRequest, VertexResponse
from bicl.frontends.http.schemas.completions import CompletionRequest
from bicl.frontends.http.schemas.generate import (
    CompatGenerateRequest,
    GenerateParameters,
    GenerateRequest,
)
from bicl.frontends.http.server_state import ServerState
from bicl.frontends.http.unsupported import refuse_unsupported

router = APIRouter(
    route_class=JsonRoute, dependencies=[Depends(refuse_while_draining)], responses=ERRORS
)


@router.post("/invocations", tags=TAGS)
async def invocations(
    request: Request,
    body: CompatGenerateRequest | ChatRequest | CompletionRequest,
    server: Server,
    salt: Salt,
) -> Response:
    """`/`, `/v1/chat/completions` or `/v1/completions`, by the shape of the body."""
    if isinstance(body, CompatGenerateRequest):
        return await compat_generate(request, body, server, salt)
    if isinstance(body, ChatRequest):
        return await chat_completions(request, body, server, salt)
    return await completions(request, body, server, salt)


@router.post("/vertex", response_model=VertexResponse, tags=TAGS)
async def vertex(request: Request, body: VertexRequest, server: Server, salt: Salt) -> Response:
    """Several prompts or conversations at once; the texts of all, or one error."""
    server.metrics.request_arrived(len(body.instances))
    if not body.instances:
        text = "Input validation error"
        raise WireError(422, text, text, "validation")
    requests = [_to_generate(server, instance) for instance in body.instances]
    return await while_connected(request, server, _predict(server, requests, salt))


def _to_generate(
    server: ServerState, instance: VertexGenerate | ChatRequest
) -> tuple[GenerateRequest, bool]:
    """A request, and whether its text still needs the tokenizer's special tokens."""
    if isinstance(instance, ChatRequest):
        refuse_unsupported("/v1/chat/completions", instance)
        return to_generate(instance, server.chat_template)[0], False
    given = instance.parameters or GenerateParameters()
    refuse_unsupported("/generate", given)
    sampling = given.model_copy(update={"do_sample": True, "best_of": None})
    return GenerateRequest(inputs=instance.inputs, parameters=sampling), True


async def _predict(
    server: ServerState, requests: list[tuple[GenerateRequest, bool]], salt: str
) -> Response:
    started = time.perf_counter()
    try:
        answers = await all_or_none(
            [
                server.inference.generate(each, salt, add_special_tokens=special, started=started)
                for each, special in requests
            ]
        )
    except WireError as error:  # TGI tells Vertex no more than this
        text = "Incomplete generation"
        raise WireError(500, text, text, error.metric) from error
    for answer in answers:
        tokens = answer.done.usage.generated_tokens
        server.metrics.request_succeeded(answer.times(started), tokens)
    texts = [answer.done.generated_text for answer in answers]
    return json_answer(VertexResponse(predictions=texts).to_json())
