"""``/v1/completions``."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from bicl.frontends.http.answers import (
    answer_headers,
    cached_by_tier,
    finish_reason,
    now,
    stream_headers,
    stream_responses,
    usage,
)
from bicl.frontends.http.body import JsonRoute
from bicl.frontends.http.errors import WireError
from bicl.frontends.http.inference import Generated, all_or_none
from bicl.frontends.http.openai import generate_parameters
from bicl.frontends.http.routes.common import (
    ERRORS,
    TAGS,
    Salt,
    Server,
    json_answer,
    openai_error,
    refuse_while_draining,
    while_connected,
)
from bicl.frontends.http.schemas.completions import (
    Chunk,
    CompletionComplete,
    CompletionFinal,
    CompletionRequest,
)
from bicl.frontends.http.schemas.generate import GenerateRequest, StreamResponse
from bicl.frontends.http.server_state import ServerState
from bicl.frontends.http.sse import DONE, EventStream, data
from bicl.frontends.http.unsupported import refuse_unsupported
from bicl.metrics import RequestTimes

router = APIRouter(
    route_class=JsonRoute, dependencies=[Depends(refuse_while_draining)], responses=ERRORS
)


@router.post("/v1/completions", response_model=CompletionFinal, tags=TAGS)
async def completions(
    request: Request, body: CompletionRequest, server: Server, salt: Salt
) -> Response:
    """OpenAI's completions, streamed (`Chunk`) or not."""
    started = time.perf_counter()
    server.metrics.request_arrived(len(body.prompts))
    _refuse(server, body)
    requests = [_to_generate(prompt, body) for prompt in body.prompts]
    characters = sum(len(prompt) for prompt in body.prompts)
    if body.stream:
        events = _completion_events(server, requests, salt, started)
        return EventStream(events, stream_headers(server, characters), server.client_left)
    call = _complete(server, requests, characters, salt, started)
    return await while_connected(request, server, call)


def _refuse(server: ServerState, body: CompletionRequest) -> None:
    limit = server.config.max_client_batch_size
    refuse_unsupported("/v1/completions", body)
    if body.suffix is not None:
        text = "Suffix is not supported and can be achieved by preprocessing the prompt."
        raise WireError(422, text, "suffix not supported", "validation")
    if len(body.prompts) > limit:
        text = f"Number of prompts exceeds the maximum allowed batch size of {limit}"
        raise WireError(422, text, "batch size exceeded", "validation")


def _to_generate(prompt: str, body: CompletionRequest) -> GenerateRequest:
    parameters = generate_parameters(body, repetition_penalty=body.repetition_penalty)
    return GenerateRequest(inputs=prompt, parameters=parameters)


async def _complete(
    server: ServerState, requests: list[GenerateRequest], characters: int, salt: str, started: float
) -> Response:
    answers = await all_or_none(
        [server.inference.generate(each, salt, started=started) for each in requests]
    )
    for answer in answers:
        tokens = answer.done.usage.generated_tokens
        server.metrics.request_succeeded(answer.times(started), tokens)
    prompt_tokens = sum(answer.valid.input_length for answer in answers)
    generated_tokens = sum(answer.done.usage.generated_tokens for answer in answers)
    cached_tokens = sum(answer.done.usage.cached_tokens for answer in answers)
    response = CompletionFinal(
        created=now(),
        model=server.info.model_id,
        system_fingerprint=server.fingerprint,
        choices=[
            CompletionComplete(
                index=index,
                text=answer.done.generated_text,
                finish_reason=finish_reason(answer.done.finish_reason),
            )
            for index, answer in enumerate(answers)
        ],
        usage=usage(
            prompt_tokens,
            generated_tokens,
            cached_tokens,
            by_tier=cached_by_tier(answer.done.usage for answer in answers),
        ),
    )
    headers = answer_headers(
        server,
        _summed(answers, started),
        characters=characters,
        prompt_tokens=prompt_tokens,
        generated_tokens=generated_tokens,
        cached_tokens=cached_tokens,
    )
    return json_answer(response.to_json(), headers)


def _summed(answers: list[Generated], started: float) -> RequestTimes:
    """TGI's headers add up the prompts' times."""
    each = [answer.times(started) for answer in answers]
    return RequestTimes(
        total=sum(times.total for times in each),
        validation=sum(times.validation for times in each),
        queue=sum(times.queue for times in each),
        inference=sum(times.inference for times in each),
        per_token=sum(times.per_token for times in each),
    )


async def _completion_events(
    server: ServerState, requests: list[GenerateRequest], salt: str, started: float
) -> AsyncGenerator[bytes, None]:
    """Events of all prompts as they come, told apart by ``index``."""
    queue: asyncio.Queue[bytes | None] = asyncio.Queue(maxsize=len(requests))
    tasks = [
        asyncio.ensure_future(_feed(queue, server, index, request, salt, started))
        for index, request in enumerate(requests)
    ]
    try:
        running = len(tasks)
        while running:
            event = await queue.get()
            if event is None:
                running -= 1
            else:
                yield event
        yield DONE
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _feed(
    queue: asyncio.Queue[bytes | None],
    server: ServerState,
    index: int,
    request: GenerateRequest,
    salt: str,
    started: float,
) -> None:
    try:
        async with aclosing(stream_responses(server, request, salt, started=started)) as responses:
            async for response in responses:
                await queue.put(data(_event(server, index, response).to_json()))
    except WireError as error:
        await queue.put(openai_error(server, error))
    finally:
        with contextlib.suppress(asyncio.CancelledError):
            await queue.put(None)


def _event(server: ServerState, index: int, response: StreamResponse) -> Chunk | CompletionFinal:
    facts = response.details
    choice = CompletionComplete(
        index=index,
        text=response.token.text,
        finish_reason=facts.finish_reason if facts is not None else "",
    )
    envelope: dict[str, Any] = {
        "created": now(),
        "model": server.info.model_id,
        "system_fingerprint": server.fingerprint,
        "choices": [choice],
    }
    if facts is None:
        return Chunk(**envelope)
    counts = usage(
        facts.input_length,
        facts.generated_tokens,
        facts.cached_tokens,
        by_tier=facts.cached_tokens_by_tier,
    )
    return CompletionFinal(**envelope, usage=counts)
