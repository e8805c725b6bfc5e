"""``/v1/chat/completions``, ``/v1/completions``, ``/chat_tokenize``."""

import pytest
from fake_engine import FakeEngine
from openai_events import HELLO, data_of
from starlette.testclient import TestClient
from transformers import PreTrainedTokenizerFast

PROMPT = "<user>hello\n<assistant>"


def test_a_chat_answer_has_tgis_fields_and_cached_tokens(
    client: TestClient, engine: FakeEngine
) -> None:
    engine.cached_tokens = 3
    body = {"messages": HELLO, "max_tokens": 2}
    response = client.post("/v1/chat/completions", json=body)
    answer = response.json()
    assert list(answer) == [
        "object",
        "id",
        "created",
        "model",
        "system_fingerprint",
        "choices",
        "usage",
    ]
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "<u"},
            "logprobs": None,
            "finish_reason": "length",
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": len(PROMPT),
        "completion_tokens": 2,
        "total_tokens": len(PROMPT) + 2,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert (answer["object"], answer["id"]) == ("chat.completion", "")
    assert answer["model"] == "fake/model"
    assert response.headers["x-cached-tokens"] == "3"


def test_a_chat_request_names_its_model_but_gets_the_one_that_is_served(
    client: TestClient,
) -> None:
    def model(name: str | None) -> str:
        body = {"messages": HELLO, "max_tokens": 1, "model": name}
        return client.post("/v1/chat/completions", json=body).json()["model"]

    assert [model(None), model("tgi"), model("gpt-4")] == ["fake/model", "fake/model", "gpt-4"]


def test_chat_chunks_end_with_a_reason_usage_and_done(client: TestClient) -> None:
    body = {
        "messages": HELLO,
        "max_tokens": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    response = client.post("/v1/chat/completions", json=body)
    first, second, usage = data_of(response.text)
    assert list(first) == [
        "object",
        "id",
        "created",
        "model",
        "system_fingerprint",
        "choices",
        "usage",
    ]
    assert first["choices"] == [
        {
            "index": 0,
            "delta": {"role": "assistant", "content": "<"},
            "logprobs": None,
            "finish_reason": None,
        }
    ]
    assert first["usage"] is None
    assert second["choices"][0]["finish_reason"] == "length"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 2
    del body["stream_options"]
    assert len(data_of(client.post("/v1/chat/completions", json=body).text)) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs(client: TestClient, stream: bool) -> None:
    body = {"messages": HELLO, "max_tokens": 1, "logprobs": True, "top_logprobs": 2}
    response = client.post("/v1/chat/completions", json={**body, "stream": stream})
    answer = data_of(response.text)[0] if stream else response.json()
    assert answer["choices"][0]["logprobs"] == {
        "content": [
            {
                "token": "<",
                "logprob": -0.1,
                "top_logprobs": [
                    {"token": "<", "logprob": -0.25},
                    {"token": "<", "logprob": -1.25},
                ],
            }
        ]
    }


def test_temperature_zero_is_greedy_and_anything_else_samples(
    client: TestClient, engine: FakeEngine
) -> None:
    for temperature in (0, 0.5, None):
        body = {"messages": HELLO, "max_tokens": 1, "temperature": temperature}
        client.post("/v1/chat/completions", json=body)
    assert [request.params.do_sample for request in engine.requests] == [False, True, True]


def test_max_completion_tokens_is_another_name_of_max_tokens(
    client: TestClient, engine: FakeEngine
) -> None:
    body = {"messages": HELLO, "max_completion_tokens": 3}
    client.post("/v1/chat/completions", json=body)
    assert engine.requests[0].params.max_new_tokens == 3


def test_stop_may_be_one_string_as_openai_has_it(client: TestClient, engine: FakeEngine) -> None:
    chat = {"messages": HELLO, "max_tokens": 1}
    for stop in ("a", ["a", "b"], None):
        client.post("/v1/chat/completions", json={**chat, "stop": stop})
        client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "stop": stop})
    stops = [request.params.stop for request in engine.requests]
    assert stops == [("a",)] * 2 + [("a", "b")] * 2 + [()] * 2
    refused = client.post("/v1/completions", json={"prompt": "a", "stop": [1]})
    assert refused.status_code == 422


def test_a_conversation_that_ends_with_the_assistant_is_continued(
    client: TestClient, tokenizer: PreTrainedTokenizerFast, engine: FakeEngine
) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "It is"}]
    client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
    assert tokenizer.decode(engine.requests[0].prompt_ids) == "<user>hello\n<assistant>It is"


def test_text_chunks_are_joined_and_images_are_refused_by_name(
    client: TestClient, engine: FakeEngine, tokenizer: PreTrainedTokenizerFast
) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}
    client.post("/v1/chat/completions", json=body)
    assert tokenizer.decode(engine.requests[0].prompt_ids) == PROMPT
    parts.append({"type": "image_url", "image_url": {"url": "http://x/y.png"}})
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 422
    assert response.json()["error"] == "Input validation error: image modality is not supported"


@pytest.mark.parametrize(
    ("field", "value"), [("n", 2), ("logit_bias", [1.0]), ("logit_bias", {"1": 2})]
)
def test_chat_fields_that_cannot_be_honoured_are_refused_by_name(
    client: TestClient, field: str, value: object
) -> None:
    response = client.post("/v1/chat/completions", json={"messages": HELLO, field: value})
    assert response.status_code == 422
    assert f"`{field}`" in response.json()["error"]


def test_neutral_values_of_such_fields_are_taken(client: TestClient) -> None:
    neutral = {"n": 1, "logit_bias": None, "presence_penalty": 0, "frequency_penalty": 0}
    body = {"messages": HELLO, "max_tokens": 1, **neutral}
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    neutral |= {"echo": False, "best_of": 1, "logprobs": None, "logit_bias": {}}
    body = {"prompt": "a", "max_tokens": 1, **neutral}
    assert client.post("/v1/completions", json=body).status_code == 200


def test_a_refused_chat_stream_tells_the_error_inside_and_ends(client: TestClient) -> None:
    body = {"messages": HELLO, "stream": True, "top_p": 7}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    (error,) = data_of(response.text)
    assert error == {
        "error": {
            "message": "Input validation error: `top_p` must be > 0.0 and < 1.0",
            "http_status_code": 422,
        }
    }


def test_a_chat_without_template_is_a_template_error(
    client: TestClient, tokenizer: PreTrainedTokenizerFast, make_client, monkeypatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", None)
    response = make_client().post("/v1/chat/completions", json={"messages": HELLO})
    assert response.status_code == 422
    assert response.json() == {
        "error": "Template error: template not found",
        "error_type": "template_error",
    }


def test_a_template_that_refuses_the_messages_is_422(
    tokenizer: PreTrainedTokenizerFast, make_client, monkeypatch
) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    response = make_client().post("/v1/chat/completions", json={"messages": HELLO})
    assert response.status_code == 422
    assert response.json()["error"] == "Template error: roles must alternate"


def test_a_template_file_replaces_the_models(make_client, engine, tokenizer, tmp_path) -> None:
    path = tmp_path / "tokenizer_config.json"
    path.write_text('{"chat_template": "X{{ messages[0].content }}"}')
    client = make_client(tokenizer_config_path=str(path))
    client.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 1})
    assert tokenizer.decode(engine.requests[0].prompt_ids) == "Xhello"


def test_completions_answer_all_prompts_in_order(client: TestClient) -> None:
    body = {"prompt": ["hello", "abc"], "max_tokens": 2}
    response = client.post("/v1/completions", json=body)
    answer = response.json()
    assert list(answer) == [
        "object",
        "id",
        "created",
        "model",
        "system_fingerprint",
        "choices",
        "usage",
    ]
    assert answer["choices"] == [
        {"index": 0, "text": "he", "logprobs": None, "finish_reason": "length"},
        {"index": 1, "text": "ab", "logprobs": None, "finish_reason": "length"},
    ]
    assert answer["usage"]["prompt_tokens"] == 8
    assert answer["usage"]["total_tokens"] == 12
    assert response.headers["x-prompt-tokens"] == "8"


def test_completion_streams_are_told_apart_by_index(client: TestClient) -> None:
    body = {"prompt": ["hello", "abc"], "max_tokens": 2, "stream": True}
    chunks = data_of(client.post("/v1/completions", json=body).text)
    texts = {0: "", 1: ""}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        assert ("usage" in chunk) == (choice["finish_reason"] != "")
    assert texts == {0: "he", 1: "ab"}


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        ({"prompt": "a", "suffix": "b"}, "suffix not supported", "Suffix is not supported"),
        ({"prompt": ["a"] * 5}, "batch size exceeded", "maximum allowed batch size of 4"),
        ({"prompt": "a", "echo": True}, "validation", "`echo` is not supported"),
        ({"prompt": "a", "logprobs": 1}, "validation", "`logprobs` is not supported"),
        ({"prompt": "a", "n": 2}, "validation", "`n` is not supported"),
    ],
)
def test_completions_that_cannot_be_honoured_are_refused(
    client: TestClient, engine: FakeEngine, body: dict, kind: str, text: str
) -> None:
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 422
    assert response.json()["error_type"] == kind
    assert text in response.json()["error"]
    assert engine.requests == []


def test_one_bad_prompt_refuses_all_and_leaves_nothing_running(make_client, tokenizer) -> None:
    engine = FakeEngine(tokenizer.decode, tick=0.01)
    client = make_client(engine=engine)
    body = {"prompt": ["hello", "x" * 200], "max_tokens": 100}
    assert client.post("/v1/completions", json=body).status_code == 422
    assert engine.snapshot().batch_size == 0


def test_chat_tokenize_gives_the_prompt_and_its_tokens(client: TestClient) -> None:
    response = client.post("/chat_tokenize", json={"messages": HELLO})
    answer = response.json()
    assert answer["templated_text"] == PROMPT
    assert "".join(token["text"] for token in answer["tokenize_response"]) == PROMPT
