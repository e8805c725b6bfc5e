"""Messages to a prompt, with the model's own template."""

from __future__ import annotations

import json
from typing import Any

from jinja2 import Environment, TemplateError, meta
from transformers import PreTrainedTokenizerBase

from bicl.frontends.http.errors import template_error
from bicl.frontends.http.schemas.chat import ImageChunk, Message, Tool
from bicl.frontends.http.unsupported import refuse_images

__all__ = ["DEFAULT_TOOL_PROMPT", "ChatTemplate"]

DEFAULT_TOOL_PROMPT = (
    "\nAnswer with one JSON object that calls the most fitting of the functions above, in the form "
    "{name: function name, parameters: dictionary of argument names and values}, with literal "
    "values only.\n"
)


class ChatTemplate:
    """Renders conversations.

    Args:
        tokenizer: owner of the template and of the special tokens in it.
        template: replaces the tokenizer's own.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._template = template or _default_template(tokenizer.chat_template)
        self._knows_tools = self._template is not None and _uses_tools(self._template)

    def render(
        self, messages: list[Message], tools: list[Tool] | None = None, tool_prompt: str = ""
    ) -> str:
        """The prompt. If the last message is the assistant's, the prompt continues it.

        Raises:
            WireError: no template, images, or the template refuses the messages.
        """
        if self._template is None:
            raise template_error("template not found")
        conversation = [_plain(message) for message in messages]
        if tools and messages and messages[-1].content is not None:
            conversation[-1]["content"] += self._tool_text(tools, tool_prompt)
        try:
            text = self._tokenizer.apply_chat_template(
                conversation,
                tools=[_openai_tool(tool) for tool in tools] if tools else None,
                chat_template=self._template,
                add_generation_prompt=True,
                tokenize=False,
            )
        except (TemplateError, TypeError, ValueError, KeyError, IndexError) as error:
            raise template_error(str(error)) from None
        if conversation and conversation[-1]["role"] == "assistant":
            return _continued(str(text), conversation[-1]["content"])
        return str(text)

    def _tool_text(self, tools: list[Tool], tool_prompt: str) -> str:
        if self._knows_tools:
            return f"\n---\n{tool_prompt}"
        listed = json.dumps([_openai_tool(tool) for tool in tools], ensure_ascii=False)
        return f"\n---\n{listed}\n{tool_prompt}"


def _default_template(template: Any) -> str | None:
    return template.get("default") if isinstance(template, dict) else template


def _uses_tools(template: str) -> bool:
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    text = template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    try:
        return "tools" in meta.find_undeclared_variables(environment.parse(text))
    except TemplateError:
        return False


def _plain(message: Message) -> dict[str, Any]:
    if message.content is None:
        calls = [call.model_dump() for call in message.tool_calls or []]
        content = json.dumps(calls, ensure_ascii=False)
    elif isinstance(message.content, str):
        content = message.content
    else:
        if any(isinstance(chunk, ImageChunk) for chunk in message.content):
            refuse_images()
        content = "".join(chunk.text for chunk in message.content if hasattr(chunk, "text"))
    return {"role": message.role, "content": content}


def _openai_tool(tool: Tool) -> dict[str, Any]:
    function = tool.function
    return {
        "type": tool.type,
        "function": {
            "name": function.name,
            "description": function.description or "",
            "parameters": function.arguments,
        },
    }


def _continued(text: str, content: str) -> str:
    """Cut the prompt behind the assistant's words, so that generation goes on from there."""
    position = text.rfind(content)
    return text if position < 0 else text[: position + len(content)].rstrip()
