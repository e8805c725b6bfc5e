"""Between the engine's events and TGI's JSON: conversion, headers, and the event generator."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing

from bicl.frontends.http.errors import validation_error
from bicl.frontends.http.inference import Generated, Step, request_times
from bicl.frontends.http.request import FinishReason, RequestDone, SparseUsage, TokenEvent
from bicl.frontends.http.request import Token as EngineToken
from bicl.frontends.http.request import Usage as EngineUsage
from bicl.frontends.http.schemas.base import shortest_f32
from bicl.frontends.http.schemas.chat import PromptTokensDetails, Usage
from bicl.frontends.http.schemas.generate import (
    BestOfSequence,
    CachedByTier,
    Details,
    GenerateRequest,
    HySparseDetails,
    PrefillToken,
    StreamDetails,
    StreamResponse,
    Token,
)
from bicl.frontends.http.server_state import ServerState
from bicl.metrics import RequestTimes

__all__ = [
    "answer_headers",
    "best_of_sequence",
    "details",
    "finish_reason",
    "hysparse_details",
    "stream_headers",
    "stream_responses",
    "usage",
    "wire_token",
]


def wire_token(token: EngineToken) -> Token:
    return Token.model_construct(
        id=token.id, text=token.text, logprob=shortest_f32(token.logprob), special=token.special
    )


def wire_tokens(tokens: Iterable[EngineToken]) -> list[Token]:
    return [wire_token(token) for token in tokens]


def finish_reason(reason: FinishReason) -> str:
    """OpenAI's name where TGI uses it: the end-of-sequence token is ``stop`` there."""
    return "stop" if reason is FinishReason.EOS_TOKEN else str(reason)


def _prefill(done: RequestDone) -> list[PrefillToken]:
    return [
        PrefillToken(id=token.id, text=token.text, logprob=shortest_f32(token.logprob))
        for token in done.prefill
    ]


def _top_tokens(answer: Generated) -> list[list[Token]]:
    if answer.valid.params.top_n_tokens == 0:
        return []
    return [wire_tokens(event.top_tokens) for event in answer.events]


def details(answer: Generated, others: list[BestOfSequence] | None = None) -> Details:
    done = answer.done
    return Details(
        finish_reason=str(done.finish_reason),
        generated_tokens=done.usage.generated_tokens,
        seed=answer.valid.reported_seed,
        prefill=_prefill(done),
        tokens=wire_tokens(event.token for event in answer.events),
        best_of_sequences=others,
        top_tokens=_top_tokens(answer),
        cached_tokens=done.usage.cached_tokens,
        cached_tokens_by_tier=cached_by_tier([done.usage]),
        hysparse=hysparse_details(done.usage.sparse),
    )


def best_of_sequence(answer: Generated, prompt: str) -> BestOfSequence:
    done = answer.done
    return BestOfSequence(
        generated_text=prompt + done.generated_text,
        finish_reason=str(done.finish_reason),
        generated_tokens=done.usage.generated_tokens,
        seed=answer.valid.reported_seed,
        prefill=_prefill(done),
        tokens=wire_tokens(event.token for event in answer.events),
        top_tokens=_top_tokens(answer),
        cached_tokens=done.usage.cached_tokens,
        cached_tokens_by_tier=cached_by_tier([done.usage]),
        hysparse=hysparse_details(done.usage.sparse),
    )


def cached_by_tier(usages: Iterable[EngineUsage]) -> CachedByTier | None:
    """Sums over requests; ``None`` if nothing came from below the device."""
    each = list(usages)
    host = sum(usage.cached_host_tokens for usage in each)
    disk = sum(usage.cached_disk_tokens for usage in each)
    if not host + disk:
        return None
    device = sum(usage.cached_tokens for usage in each) - host - disk
    return CachedByTier(device=device, host=host, disk=disk)


def hysparse_details(told: SparseUsage | None) -> HySparseDetails | None:
    if told is None:
        return None
    return HySparseDetails(
        sparsity_ratio=told.sparsity_ratio,
        actual_sparsity_ratio=round(told.actual_ratio, 4),
        tiles_read=told.tiles_read,
        tiles_total=told.tiles_total,
        exercised=told.tiles_read < told.tiles_total,
        attention_mass_kept=None if told.mass_kept is None else round(told.mass_kept, 4),
        attention_entropy=None if told.entropy is None else round(told.entropy, 4),
        attention_entropy_by_group={
            name: round(value, 4) for name, value in told.entropy_by_group.items()
        },
        shadow_steps=told.shadow_steps,
        fallback=told.fallback or None,
        text_kind=told.text_kind or None,
    )


def usage(
    prompt_tokens: int,
    completion_tokens: int,
    cached_tokens: int,
    hysparse: HySparseDetails | None = None,
    by_tier: CachedByTier | None = None,
) -> Usage:
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(
            cached_tokens=cached_tokens, cached_tokens_by_tier=by_tier
        ),
        hysparse=hysparse,
    )


def _milliseconds(seconds: float) -> str:
    return str(int(seconds * 1000))


def answer_headers(
    server: ServerState,
    times: RequestTimes,
    *,
    characters: int,
    prompt_tokens: int,
    generated_tokens: int,
    cached_tokens: int,
) -> dict[str, str]:
    """Headers of an answer that is not streamed."""
    return {
        "x-compute-type": server.compute_type,
        "x-compute-time": f"{times.total:.9f}".rstrip("0").rstrip("."),
        "x-compute-characters": str(characters),
        "x-total-time": _milliseconds(times.total),
        "x-validation-time": _milliseconds(times.validation),
        "x-queue-time": _milliseconds(times.queue),
        "x-inference-time": _milliseconds(times.inference),
        "x-time-per-token": _milliseconds(times.per_token),
        "x-prompt-tokens": str(prompt_tokens),
        "x-generated-tokens": str(generated_tokens),
        "x-cached-tokens": str(cached_tokens),
    }


def stream_headers(server: ServerState, characters: int) -> dict[str, str]:
    """Headers of a streamed answer, sent before anything is known about it."""
    return {
        "x-compute-type": server.compute_type,
        "x-compute-characters": str(characters),
        "x-accel-buffering": "no",
    }


async def stream_responses(
    server: ServerState,
    request: GenerateRequest,
    salt: str,
    *,
    add_special_tokens: bool = True,
    started: float,
) -> AsyncGenerator[StreamResponse, None]:
    """``/generate_stream``'s events, from which the OpenAI routes make theirs.

    Raises:
        WireError: refused or failed; TGI tells it inside the stream.
    """
    parameters = request.parameters
    if parameters.best_of not in (None, 1):
        raise validation_error("`best_of` != 1 is not supported when streaming tokens")
    if parameters.decoder_input_details:
        raise validation_error(
            "`decoder_input_details` == true is not supported when streaming tokens"
        )
    generation = await server.inference.start(
        request, salt, add_special_tokens=add_special_tokens, started=started
    )
    prompt = request.inputs if parameters.return_full_text else ""
    async with aclosing(generation.steps()) as steps:
        async for step in steps:
            if step.done is None:
                yield _stream_response(step)
                continue
            times = request_times(started, generation.validation_time, step.done)
            server.metrics.request_succeeded(times, step.done.usage.generated_tokens)
            yield _last_response(
                step.index,
                step.event,
                step.done,
                prompt,
                generation.valid.reported_seed if parameters.details else None,
                parameters.details,
            )


def _stream_response(step: Step) -> StreamResponse:
    return StreamResponse.model_construct(
        index=step.index,
        token=wire_token(step.event.token),
        top_tokens=wire_tokens(step.event.top_tokens),
        generated_text=None,
        details=None,
    )


def _last_response(
    index: int,
    event: TokenEvent,
    done: RequestDone,
    prompt: str,
    seed: int | None,
    with_details: bool,
) -> StreamResponse:
    facts = StreamDetails(
        finish_reason=str(done.finish_reason),
        generated_tokens=done.usage.generated_tokens,
        seed=seed,
        input_length=done.usage.prompt_tokens,
        cached_tokens=done.usage.cached_tokens,
        cached_tokens_by_tier=cached_by_tier([done.usage]),
        hysparse=hysparse_details(done.usage.sparse),
    )
    return StreamResponse(
        index=index,
        token=wire_token(event.token),
        top_tokens=wire_tokens(event.top_tokens),
        generated_text=prompt + done.generated_text,
        details=facts if with_details else None,
    )


def now() -> int:
    """OpenAI's ``created``."""
    return int(time.time())
