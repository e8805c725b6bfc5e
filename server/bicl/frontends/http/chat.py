"""Chat requests in terms of ``/generate``, and its stream in terms of chat chunks."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass

from bicl.frontends.http.answers import finish_reason, now, usage
from bicl.frontends.http.chat_template import DEFAULT_TOOL_PROMPT, ChatTemplate
from bicl.frontends.http.errors import tool_error
from bicl.frontends.http.openai import generate_parameters
from bicl.frontends.http.request import FinishReason
from bicl.frontends.http.schemas.chat import (
    ChatCompletionChoice,
    ChatCompletionChunk,
    ChatCompletionLogprob,
    ChatCompletionLogprobs,
    ChatCompletionTopLogprob,
    ChatRequest,
    DeltaToolCall,
    Function,
    TextMessage,
    ToolCallDelta,
)
from bicl.frontends.http.schemas.generate import (
    GenerateRequest,
    JsonGrammar,
    StreamResponse,
    Token,
)
from bicl.frontends.http.tools import NO_TOOL, ToolCallSplitter, choose_tools, tool_schema

__all__ = ["ChatStream", "chat_logprobs", "next_tool_call_id", "to_generate"]


def to_generate(
    chat: ChatRequest, template: ChatTemplate, *, with_tools: bool = True
) -> tuple[GenerateRequest, bool]:
    """The request to ``/generate`` that answers ``chat``, and whether it must call a tool.

    Raises:
        WireError: contradictory fields, or messages that the template refuses.
    """
    grammar = chat.response_format if with_tools else None
    tools = chat.tools if with_tools else None
    if grammar is not None and tools is not None:
        raise tool_error("Grammar and tools are mutually exclusive")
    chosen = choose_tools(tools, chat.tool_choice) if tools else []
    if chosen:
        inputs = template.render(chat.messages, chosen, chat.tool_prompt or DEFAULT_TOOL_PROMPT)
        grammar = JsonGrammar(type="json", value=tool_schema(chosen))
    else:
        inputs = template.render(chat.messages)
    parameters = generate_parameters(
        chat,
        # TGI's mapping; 0 means "no penalty" to every OpenAI client and stays so.
        repetition_penalty=chat.presence_penalty + 2.0 if chat.presence_penalty else None,
        top_n_tokens=chat.top_logprobs,
        grammar=grammar,
    )
    return GenerateRequest(inputs=inputs, parameters=parameters), bool(chosen)


def next_tool_call_id(chat: ChatRequest) -> str:
    """Counts on from the ids in the conversation; a random id where they are no numbers."""
    ids = [call.id for message in chat.messages for call in message.tool_calls or []]
    try:
        return str(max((int(each) + 1 for each in ids), default=0))
    except ValueError:
        return str(uuid.uuid4())


def chat_logprobs(tokens: list[Token], top_tokens: list[list[Token]]) -> ChatCompletionLogprobs:
    padded = top_tokens + [[] for _ in range(len(tokens) - len(top_tokens))]
    return ChatCompletionLogprobs(
        content=[
            ChatCompletionLogprob(
                token=token.text,
                logprob=token.logprob,
                top_logprobs=[
                    ChatCompletionTopLogprob(token=other.text, logprob=other.logprob)
                    for other in others
                ],
            )
            for token, others in zip(tokens, padded, strict=True)
        ]
    )


class NoToolChosen(Exception):
    """The model wants to answer in words: ask again without tools."""


@dataclass
class ChatStream:
    """Turns generated tokens into chat chunks."""

    model: str
    fingerprint: str
    logprobs: bool
    include_usage: bool
    tool_call_id: str
    using_tools: bool

    def __post_init__(self) -> None:
        self._calls = ToolCallSplitter()

    def push(self, token: StreamResponse) -> Iterator[ChatCompletionChunk]:
        """Chunks that this token completes.

        Raises:
            NoToolChosen: instead of the first chunk.
        """
        if self.using_tools:
            yield from self._push_call(token)
        else:
            text = "" if token.token.special else token.token.text
            yield self._chunk(token, TextMessage(role="assistant", content=text))
        if self.include_usage and token.details is not None:
            yield self._usage(token)

    def _push_call(self, token: StreamResponse) -> Iterator[ChatCompletionChunk]:
        known = self._calls.name is not None
        piece = None if token.token.special else self._calls.push(token.token.text)
        if self._calls.name == NO_TOOL:
            raise NoToolChosen
        last = token.details is not None
        if last:
            piece = (piece or "") + (self._calls.finish() or "") or None
        if piece is not None:
            function = Function(name=None if known else self._calls.name, arguments=piece)
            call = DeltaToolCall(index=0, id=self.tool_call_id, type="function", function=function)
            yield self._chunk(token, ToolCallDelta(role="assistant", tool_calls=[call]))
        elif last:
            yield self._chunk(token, TextMessage(role="assistant", content=""))

    def _chunk(
        self, token: StreamResponse, delta: TextMessage | ToolCallDelta
    ) -> ChatCompletionChunk:
        reason = token.details and finish_reason(FinishReason(token.details.finish_reason))
        choice = ChatCompletionChoice(
            index=0,
            delta=delta,
            logprobs=chat_logprobs([token.token], [token.top_tokens]) if self.logprobs else None,
            finish_reason=reason or None,
        )
        return self._envelope([choice])

    def _usage(self, token: StreamResponse) -> ChatCompletionChunk:
        facts = token.details
        assert facts is not None
        chunk = self._envelope([])
        chunk.usage = usage(
            facts.input_length,
            facts.generated_tokens,
            facts.cached_tokens,
            facts.hysparse,
            facts.cached_tokens_by_tier,
        )
        return chunk

    def _envelope(self, choices: list[ChatCompletionChoice]) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            created=now(),
            model=self.model,
            system_fingerprint=self.fingerprint,
            choices=choices,
            usage=None,
        )
