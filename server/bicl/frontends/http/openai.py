"""What OpenAI's two kinds of requests have in common."""

from __future__ import annotations

from typing import Any

from bicl.frontends.http.schemas.chat import ChatRequest
from bicl.frontends.http.schemas.completions import CompletionRequest
from bicl.frontends.http.schemas.generate import GenerateParameters

__all__ = ["generate_parameters"]


def generate_parameters(body: ChatRequest | CompletionRequest, **more: Any) -> GenerateParameters:
    """The parameters of the request to ``/generate``. Temperature 0 is greedy, as OpenAI has it."""
    greedy = body.temperature == 0
    return GenerateParameters(
        temperature=None if greedy else body.temperature,
        frequency_penalty=body.frequency_penalty,
        top_p=body.top_p,
        do_sample=not greedy,
        max_new_tokens=body.max_tokens,
        stop=body.stop or [],
        details=True,
        seed=body.seed,
        hy_sparse_config=body.hy_sparse_config,
        **more,
    )
