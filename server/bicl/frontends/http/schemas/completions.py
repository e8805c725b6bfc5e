"""Wire types of ``/v1/completions``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from bicl.frontends.http.schemas.base import F32, U32, U64, StopStrings, Wire
from bicl.frontends.http.schemas.chat import Usage
from bicl.frontends.http.schemas.generate import HySparseParameters

__all__ = ["Chunk", "CompletionComplete", "CompletionFinal", "CompletionRequest"]


class CompletionRequest(Wire):
    model: str | None = Field(default=None, description="Not used: one model is served.")
    prompt: str | list[str]
    max_tokens: U32 | None = None
    temperature: F32 | None = None
    top_p: F32 | None = None
    stream: bool = False
    seed: U64 | None = None
    suffix: str | None = Field(default=None, description="Not supported: answered 422.")
    repetition_penalty: F32 | None = None
    frequency_penalty: F32 | None = None
    stop: StopStrings = None
    hy_sparse_config: HySparseParameters | None = Field(
        default=None, description="Needs a server started with --enable-hysparse (BICL)."
    )
    # OpenAI's fields that TGI ignores; a value that would change the answer is refused.
    n: Any = Field(default=None, description="Only 1 is supported.")
    best_of: Any = Field(default=None, description="Only 1 is supported.")
    echo: Any = Field(default=None, description="Not supported: answered 422 if true.")
    logprobs: Any = Field(default=None, description="Not supported: answered 422 if not null.")
    logit_bias: Any = Field(default=None, description="Not supported: answered 422 unless empty.")
    presence_penalty: Any = Field(default=None, description="Not supported: answered 422 unless 0.")

    @field_validator("prompt")
    @classmethod
    def _not_empty(cls, value: str | list[str]) -> str | list[str]:
        if value == []:
            raise ValueError("Empty array detected. Do not use an empty array for the prompt.")
        return value

    @property
    def prompts(self) -> list[str]:
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt


class CompletionComplete(Wire):
    index: int
    text: str
    logprobs: None = None
    finish_reason: str


class CompletionFinal(Wire):
    object: Literal["text_completion"] = "text_completion"
    id: str = ""
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionComplete]
    usage: Usage


class Chunk(Wire):
    object: Literal["text_completion"] = "text_completion"
    id: str = ""
    created: int
    choices: list[CompletionComplete]
    model: str
    system_fingerprint: str
