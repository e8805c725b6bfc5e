"""Tools and response formats of ``/v1/chat/completions``."""

import json

import pytest
from fake_engine import FakeEngine
from openai_events import HELLO, data_of, script
from starlette.testclient import TestClient
from transformers import PreTrainedTokenizerFast

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a town",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string"}},
            "required": ["town"],
        },
    },
}
CALL = '{"function": {"_name": "get_weather", "town": "Oslo"}}'


def tool_body(**changes: object) -> dict:
    return {"messages": HELLO, "tools": [WEATHER], "tool_choice": "required", **changes}


def test_a_tool_call_is_constrained_and_parsed(
    make_client, engine: FakeEngine, tokenizer: PreTrainedTokenizerFast
) -> None:
    script(engine, tokenizer, CALL)
    client = make_client(max_input_tokens=1900, max_total_tokens=2000)
    response = client.post("/v1/chat/completions", json=tool_body())
    (choice,) = response.json()["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "tool_calls": [
            {
                "id": "0",
                "type": "function",
                "function": {
                    "description": None,
                    "name": "get_weather",
                    "arguments": '{"town":"Oslo"}',
                },
            }
        ],
    }
    schema = json.loads(engine.requests[0].params.grammar.value)
    (call,) = schema["properties"]["function"]["anyOf"]
    assert call["properties"]["_name"] == {"type": "string", "const": "get_weather"}
    assert call["required"] == ["_name", "town"]
    prompt = tokenizer.decode(engine.requests[0].prompt_ids)
    assert "get_weather" in prompt  # the template knows no tools: they stand in the message


def test_a_streamed_tool_call_has_its_name_once_and_whole_arguments(
    make_client, engine: FakeEngine, tokenizer: PreTrainedTokenizerFast
) -> None:
    script(engine, tokenizer, CALL)
    client = make_client(max_input_tokens=1900, max_total_tokens=2000)
    response = client.post("/v1/chat/completions", json=tool_body(stream=True))
    chunks = data_of(response.text)
    calls = [
        call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])
    ]
    assert [call["function"]["name"] for call in calls if call["function"]["name"]] == [
        "get_weather"
    ]
    arguments = "".join(call["function"]["arguments"] for call in calls)
    assert json.loads(arguments) == {"town": "Oslo"}
    assert {call["id"] for call in calls} == {"0"}
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_if_the_model_chooses_no_tool_it_is_asked_again_without(
    make_client, engine: FakeEngine, tokenizer: PreTrainedTokenizerFast, stream: bool
) -> None:
    script(engine, tokenizer, '{"function": {"_name": "no_tool"}}')
    client = make_client(max_input_tokens=1900, max_total_tokens=2000)
    response = client.post(
        "/v1/chat/completions", json=tool_body(tool_choice="auto", stream=stream)
    )
    first, second = engine.requests
    assert first.params.grammar is not None
    assert second.params.grammar is None
    assert "get_weather" not in tokenizer.decode(second.prompt_ids)
    if stream:
        parts = [chunk["choices"][0]["delta"]["content"] for chunk in data_of(response.text)]
        assert "".join(parts) == '{"function": {"_name": "no_tool"}}'
    else:
        assert "content" in response.json()["choices"][0]["message"]
    metrics = client.get("/metrics").text
    assert "tgi_request_count 1.0" in metrics
    assert "tgi_request_success 1.0" in metrics or stream
    assert 'tgi_request_failure{err="dropped"} 0.0' in metrics


def test_tool_choice_by_name_and_none(make_client, engine: FakeEngine, tokenizer) -> None:
    script(engine, tokenizer, CALL)
    client = make_client(max_input_tokens=1900, max_total_tokens=2000)
    other = {"type": "function", "function": {"name": "other", "parameters": {}}}
    for choice in ({"type": "function", "function": {"name": "get_weather"}}, "get_weather"):
        body = tool_body(tools=[other, WEATHER], tool_choice=choice)
        assert client.post("/v1/chat/completions", json=body).status_code == 200
        schema = json.loads(engine.requests[-1].params.grammar.value)
        (call,) = schema["properties"]["function"]["anyOf"]
        assert call["properties"]["_name"]["const"] == "get_weather"
    client.post("/v1/chat/completions", json=tool_body(tool_choice="none"))
    assert engine.requests[-1].params.grammar is None
    missing = client.post("/v1/chat/completions", json=tool_body(tool_choice="absent"))
    assert missing.status_code == 422
    assert missing.json() == {
        "error": "Tool error: Tool with name absent not found",
        "error_type": "tool_error",
    }


def test_grammar_and_tools_exclude_each_other(client: TestClient) -> None:
    body = tool_body(response_format={"type": "json", "value": {"properties": {}}})
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 422
    assert response.json()["error"] == "Tool error: Grammar and tools are mutually exclusive"


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "json", "value": {"properties": {"a": {"type": "string"}}}},
        {"type": "json_object", "value": {"properties": {"a": {"type": "string"}}}},
        {"type": "json_schema", "value": {"schema": {"properties": {"a": {"type": "string"}}}}},
        {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"properties": {"a": {"type": "string"}}}},
        },
    ],
)
def test_response_formats_of_tgi_and_openai_become_one_grammar(
    client: TestClient, engine: FakeEngine, response_format: dict
) -> None:
    body = {"messages": HELLO, "max_tokens": 1, "response_format": response_format}
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    grammar = engine.requests[0].params.grammar
    assert json.loads(grammar.value) == {"properties": {"a": {"type": "string"}}}


def test_response_format_text_is_no_grammar(client: TestClient, engine: FakeEngine) -> None:
    body = {"messages": HELLO, "max_tokens": 1, "response_format": {"type": "text"}}
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    assert engine.requests[0].params.grammar is None
