"""Wire types of ``/v1/chat/completions`` and ``/chat_tokenize``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from bicl.frontends.http.schemas.base import F32, U32, U64, StopStrings, Wire, is_empty
from bicl.frontends.http.schemas.generate import (
    CachedByTier,
    GrammarType,
    HySparseDetails,
    HySparseParameters,
    SimpleToken,
)

__all__ = [
    "ChatCompletion",
    "ChatCompletionChoice",
    "ChatCompletionChunk",
    "ChatCompletionComplete",
    "ChatCompletionLogprob",
    "ChatCompletionLogprobs",
    "ChatCompletionTopLogprob",
    "ChatRequest",
    "ChatTokenizeResponse",
    "DeltaToolCall",
    "Function",
    "FunctionDefinition",
    "FunctionName",
    "ImageChunk",
    "Message",
    "PromptTokensDetails",
    "TextChunk",
    "TextMessage",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "ToolCallMessage",
    "TypedChoice",
    "Usage",
]


class Url(Wire):
    url: str


class TextChunk(Wire):
    type: Literal["text"]
    text: str


class ImageChunk(Wire):
    type: Literal["image_url"]
    image_url: Url


MessageChunk = Annotated[TextChunk | ImageChunk, Field(discriminator="type")]


class FunctionDefinition(Wire):
    description: str | None = None
    name: str
    arguments: Any = Field(validation_alias="parameters")


class Tool(Wire):
    type: str
    function: FunctionDefinition


class ToolCall(Wire):
    id: str
    type: str
    function: FunctionDefinition


class Message(Wire):
    """``content`` or ``tool_calls``; one of them must be there."""

    role: str
    content: str | list[MessageChunk] | None = None
    tool_calls: list[ToolCall] | None = None
    name: str | None = None

    @model_validator(mode="after")
    def _has_a_body(self) -> Message:
        if self.content is None and self.tool_calls is None:
            raise ValueError("data did not match any variant of untagged enum MessageBody")
        return self


class FunctionName(Wire):
    name: str


class TypedChoice(Wire):
    type: Literal["function"]
    function: FunctionName


class StreamOptions(Wire):
    include_usage: bool = False


class ChatRequest(Wire):
    model: str | None = Field(default=None, description="Not used: one model is served.")
    messages: list[Message]
    frequency_penalty: F32 | None = None
    logit_bias: Any = Field(default=None, description="Not supported: answered 422 unless empty.")
    logprobs: bool | None = None
    top_logprobs: U32 | None = None
    max_tokens: U32 | None = None
    n: U32 | None = Field(default=None, description="Only 1 is supported.")
    presence_penalty: F32 | None = None
    stop: StopStrings = None
    stream: bool = False
    seed: U64 | None = None
    temperature: F32 | None = None
    top_p: F32 | None = None
    tools: list[Tool] | None = None
    tool_prompt: str | None = None
    tool_choice: str | TypedChoice | None = None
    response_format: GrammarType | None = None
    stream_options: StreamOptions = Field(default_factory=StreamOptions)
    hy_sparse_config: HySparseParameters | None = Field(
        default=None, description="Needs a server started with --enable-hysparse (BICL)."
    )

    @model_validator(mode="before")
    @classmethod
    def _accept_other_spellings(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if "max_completion_tokens" in data and "max_tokens" not in data:
            data = {**data, "max_tokens": data["max_completion_tokens"]}
        return {**data, "response_format": _openai_format(data.get("response_format"))}


def _openai_format(value: Any) -> Any:
    """OpenAI's spellings of ``response_format``, which TGI 3.3.7 refuses, in TGI's words."""
    if not isinstance(value, dict) or "value" in value:
        return value
    match value.get("type"):
        case "text":
            return None
        case "json_schema" if "json_schema" in value:
            return {"type": "json_schema", "value": value["json_schema"]}
        case _:
            return value


class TextMessage(Wire):
    role: str
    content: str
    tool_call_id: str | None = Field(default=None, exclude_if=is_empty)


class FunctionCall(Wire):
    description: str | None = None
    name: str
    arguments: str


class ToolCallOut(Wire):
    id: str
    type: str
    function: FunctionCall


class ToolCallMessage(Wire):
    role: str
    tool_calls: list[ToolCallOut]


class PromptTokensDetails(Wire):
    cached_tokens: int
    cached_tokens_by_tier: CachedByTier | None = Field(default=None, exclude_if=is_empty)


class Usage(Wire):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = Field(
        description="How many prompt tokens came from the cache (BICL; OpenAI's field)."
    )
    hysparse: HySparseDetails | None = Field(
        default=None, exclude_if=is_empty, description="Of one answer; only with HySparse (BICL)."
    )


class ChatCompletionTopLogprob(Wire):
    token: str
    logprob: float | None


class ChatCompletionLogprob(Wire):
    token: str
    logprob: float | None
    top_logprobs: list[ChatCompletionTopLogprob]


class ChatCompletionLogprobs(Wire):
    content: list[ChatCompletionLogprob]


class ChatCompletionComplete(Wire):
    index: int
    message: TextMessage | ToolCallMessage
    logprobs: ChatCompletionLogprobs | None
    finish_reason: str


class ChatCompletion(Wire):
    object: Literal["chat.completion"] = "chat.completion"
    id: str = ""
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatCompletionComplete]
    usage: Usage


class Function(Wire):
    name: str | None
    arguments: str


class DeltaToolCall(Wire):
    index: int
    id: str
    type: str
    function: Function


class ToolCallDelta(Wire):
    role: str
    tool_calls: list[DeltaToolCall]


class ChatCompletionChoice(Wire):
    index: int
    delta: TextMessage | ToolCallDelta
    logprobs: ChatCompletionLogprobs | None
    finish_reason: str | None


class ChatCompletionChunk(Wire):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    id: str = ""
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatCompletionChoice]
    usage: Usage | None


class ChatTokenizeResponse(Wire):
    tokenize_response: list[SimpleToken]
    templated_text: str
