"""``/v1/chat/completions`` and ``/chat_tokenize``."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from bicl.frontends.http.answers import (
    answer_headers,
    cached_by_tier,
    details,
    finish_reason,
    hysparse_details,
    now,
    stream_headers,
    stream_responses,
    usage,
)
from bicl.frontends.http.body import JsonRoute
from bicl.frontends.http.chat import (
    ChatStream,
    NoToolChosen,
    chat_logprobs,
    next_tool_call_id,
    to_generate,
)
from bicl.frontends.http.errors import WireError
from bicl.frontends.http.inference import Generated
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
from bicl.frontends.http.schemas.chat import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionComplete,
    ChatRequest,
    ChatTokenizeResponse,
    TextMessage,
    ToolCallMessage,
)
from bicl.frontends.http.schemas.generate import GenerateRequest
from bicl.frontends.http.server_state import ServerState
from bicl.frontends.http.sse import DONE, EventStream, data
from bicl.frontends.http.tokenization import simple_tokens
from bicl.frontends.http.tools import parse_call
from bicl.frontends.http.unsupported import refuse_unsupported

router = APIRouter(
    route_class=JsonRoute, dependencies=[Depends(refuse_while_draining)], responses=ERRORS
)
tokenize_router = APIRouter(route_class=JsonRoute, responses=ERRORS)


@router.post("/v1/chat/completions", response_model=ChatCompletion, tags=TAGS)
async def chat_completions(
    request: Request, body: ChatRequest, server: Server, salt: Salt
) -> Response:
    """OpenAI's chat completions, streamed (`ChatCompletionChunk`) or not."""
    started = time.perf_counter()
    server.metrics.request_arrived()
    refuse_unsupported("/v1/chat/completions", body)
    generate, using_tools = to_generate(body, server.chat_template)
    if body.stream:
        events = _chat_events(server, body, generate, using_tools, salt, started)
        headers = stream_headers(server, len(generate.inputs))
        return EventStream(events, headers, server.client_left)
    call = _complete(server, body, generate, using_tools, salt, started)
    return await while_connected(request, server, call)


def _model_of(server: ServerState, chat: ChatRequest) -> str:
    return server.info.model_id if chat.model in (None, "tgi") else str(chat.model)


async def _complete(
    server: ServerState,
    chat: ChatRequest,
    generate: GenerateRequest,
    using_tools: bool,
    salt: str,
    started: float,
) -> Response:
    answer = await _ask(server, generate, salt, started)
    call = None
    if using_tools:
        call = parse_call(answer.done.generated_text)
        if call is None:
            generate, _ = to_generate(chat, server.chat_template, with_tools=False)
            answer = await _ask(server, generate, salt, started)
    message: TextMessage | ToolCallMessage
    if call is not None:
        message = ToolCallMessage(role="assistant", tool_calls=[call])
    else:
        message = TextMessage(role="assistant", content=answer.done.generated_text)
    return _chat_answer(server, chat, generate, answer, message, started)


async def _ask(
    server: ServerState, generate: GenerateRequest, salt: str, started: float
) -> Generated:
    return await server.inference.generate(
        generate, salt, add_special_tokens=False, started=started
    )


def _chat_answer(
    server: ServerState,
    chat: ChatRequest,
    generate: GenerateRequest,
    answer: Generated,
    message: TextMessage | ToolCallMessage,
    started: float,
) -> Response:
    facts = answer.done.usage
    times = answer.times(started)
    server.metrics.request_succeeded(times, facts.generated_tokens)
    logprobs = None
    if chat.logprobs:
        told = details(answer)
        logprobs = chat_logprobs(told.tokens, told.top_tokens)
    response = ChatCompletion(
        created=now(),
        model=_model_of(server, chat),
        system_fingerprint=server.fingerprint,
        choices=[
            ChatCompletionComplete(
                index=0,
                message=message,
                logprobs=logprobs,
                finish_reason=finish_reason(answer.done.finish_reason),
            )
        ],
        usage=usage(
            answer.valid.input_length,
            facts.generated_tokens,
            facts.cached_tokens,
            hysparse_details(facts.sparse),
            cached_by_tier([facts]),
        ),
    )
    headers = answer_headers(
        server,
        times,
        characters=len(generate.inputs),
        prompt_tokens=answer.valid.input_length,
        generated_tokens=facts.generated_tokens,
        cached_tokens=facts.cached_tokens,
    )
    return json_answer(response.to_json(), headers)


async def _chat_events(
    server: ServerState,
    chat: ChatRequest,
    generate: GenerateRequest,
    using_tools: bool,
    salt: str,
    started: float,
) -> AsyncGenerator[bytes, None]:
    try:
        try:
            async with aclosing(
                _chunks(server, chat, generate, using_tools, salt, started)
            ) as chunks:
                async for chunk in chunks:
                    yield data(chunk.to_json())
        except NoToolChosen:
            generate, _ = to_generate(chat, server.chat_template, with_tools=False)
            async with aclosing(_chunks(server, chat, generate, False, salt, started)) as chunks:
                async for chunk in chunks:
                    yield data(chunk.to_json())
    except WireError as error:
        yield openai_error(server, error)
    yield DONE


async def _chunks(
    server: ServerState,
    chat: ChatRequest,
    generate: GenerateRequest,
    using_tools: bool,
    salt: str,
    started: float,
) -> AsyncGenerator[ChatCompletionChunk, None]:
    state = ChatStream(
        model=_model_of(server, chat),
        fingerprint=server.fingerprint,
        logprobs=bool(chat.logprobs),
        include_usage=chat.stream_options.include_usage,
        tool_call_id=next_tool_call_id(chat),
        using_tools=using_tools,
    )
    responses = stream_responses(server, generate, salt, add_special_tokens=False, started=started)
    async with aclosing(responses):
        async for response in responses:
            for chunk in state.push(response):
                yield chunk


@tokenize_router.post("/chat_tokenize", response_model=ChatTokenizeResponse, tags=TAGS)
async def chat_tokenize(body: ChatRequest, server: Server) -> Response:
    """Template and tokenise a chat request."""
    server.metrics.request_arrived()
    generate, _ = to_generate(body, server.chat_template)
    encoding = await server.tokenizer.encode(generate.inputs, add_special_tokens=False)
    response = ChatTokenizeResponse(
        tokenize_response=simple_tokens(encoding, generate.inputs), templated_text=generate.inputs
    )
    return json_answer(response.to_json())
