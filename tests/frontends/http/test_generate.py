"""``/``, ``/generate``, ``/generate_stream``: field sets, headers, bytes of the stream."""

import json

import pytest
from fake_engine import FakeEngine
from starlette.testclient import TestClient

HEADERS = {
    "x-compute-type",
    "x-compute-time",
    "x-compute-characters",
    "x-total-time",
    "x-validation-time",
    "x-queue-time",
    "x-inference-time",
    "x-time-per-token",
    "x-prompt-tokens",
    "x-generated-tokens",
    "x-cached-tokens",
}


def events(text: str) -> list[dict]:
    """Parse a stream strictly: every event is one ``data: `` line and one empty line."""
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def test_an_answer_without_details_has_one_field(client: TestClient) -> None:
    body = {"inputs": "hello", "parameters": {"max_new_tokens": 3}}
    response = client.post("/generate", json=body)
    assert response.content == b'{"generated_text":"hel"}'
    assert response.headers["content-type"] == "application/json"


def test_details_have_tgis_fields_in_tgis_order_and_cached_tokens(
    client: TestClient, engine: FakeEngine
) -> None:
    engine.cached_tokens = 4
    body = {"inputs": "hello", "parameters": {"max_new_tokens": 2, "details": True}}
    response = client.post("/generate", json=body)
    assert response.content == (
        b'{"generated_text":"he","details":{"finish_reason":"length","generated_tokens":2,'
        b'"seed":null,"prefill":[],"tokens":[{"id":71,"text":"h","logprob":-0.1,"special":false},'
        b'{"id":68,"text":"e","logprob":-0.1,"special":false}],"cached_tokens":4}}'
    )
    assert response.headers["x-cached-tokens"] == "4"


def test_top_tokens_are_there_only_if_asked_for(client: TestClient) -> None:
    def ask(count: int) -> dict:
        parameters = {"max_new_tokens": 2, "details": True, "top_n_tokens": count}
        body = {"inputs": "a", "parameters": parameters}
        return client.post("/generate", json=body).json()["details"]

    assert "top_tokens" not in ask(0)
    assert [len(each) for each in ask(2)["top_tokens"]] == [2, 2]


def test_headers_are_tgis_and_count_characters_and_tokens(client: TestClient) -> None:
    body = {"inputs": "héé", "parameters": {"max_new_tokens": 2}}
    headers = client.post("/generate", json=body).headers
    assert set(headers) >= HEADERS
    assert headers["x-compute-characters"] == "3"
    assert headers["x-prompt-tokens"] == "5"
    assert headers["x-generated-tokens"] == "2"
    assert float(headers["x-compute-time"]) > 0
    for name in HEADERS - {"x-compute-type", "x-compute-time"}:
        assert headers[name].isdigit()


def test_the_root_route_answers_a_list_with_the_prompt_in_front(client: TestClient) -> None:
    parameters = {"max_new_tokens": 2}
    whole = client.post("/", json={"inputs": "hello", "parameters": parameters})
    assert whole.json() == [{"generated_text": "hellohe"}]
    parameters["return_full_text"] = False
    part = client.post("/", json={"inputs": "hello", "parameters": parameters})
    assert part.json() == [{"generated_text": "he"}]
    generate = client.post("/generate", json={"inputs": "hello", "parameters": parameters})
    assert generate.json() == {"generated_text": "he"}


def test_the_root_route_streams_if_asked(client: TestClient) -> None:
    body = {"inputs": "hello", "stream": True, "parameters": {"max_new_tokens": 2}}
    assert [event["generated_text"] for event in events(client.post("/", json=body).text)] == [
        None,
        "hellohe",
    ]


def test_a_stream_has_tgis_bytes(client: TestClient, engine: FakeEngine) -> None:
    engine.cached_tokens = 2
    body = {"inputs": "hello", "parameters": {"max_new_tokens": 2, "details": True}}
    response = client.post("/generate_stream", json=body)
    assert response.content == (
        b'data: {"index":1,"token":{"id":71,"text":"h","logprob":-0.1,"special":false},'
        b'"generated_text":null,"details":null}\n\n'
        b'data: {"index":2,"token":{"id":68,"text":"e","logprob":-0.1,"special":false},'
        b'"generated_text":"he","details":{"finish_reason":"length","generated_tokens":2,'
        b'"seed":null,"input_length":5,"cached_tokens":2}}\n\n'
    )
    assert response.headers["content-type"] == "text/event-stream"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-compute-characters"] == "5"


def test_without_details_the_last_event_has_null_details(client: TestClient) -> None:
    body = {"inputs": "hello", "parameters": {"max_new_tokens": 1}}
    (only,) = events(client.post("/generate_stream", json=body).text)
    assert only["details"] is None
    assert only["generated_text"] == "h"


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"best_of": 2}, "`best_of` != 1 is not supported when streaming tokens"),
        (
            {"decoder_input_details": True},
            "`decoder_input_details` == true is not supported when streaming tokens",
        ),
        ({"temperature": 0}, "`temperature` must be strictly positive"),
    ],
)
def test_a_refused_stream_is_200_with_one_error_event(
    client: TestClient, parameters: dict, message: str
) -> None:
    response = client.post("/generate_stream", json={"inputs": "a", "parameters": parameters})
    assert response.status_code == 200
    assert events(response.text) == [
        {"error": f"Input validation error: {message}", "error_type": "validation"}
    ]


def test_a_failure_in_a_stream_is_its_last_event(client: TestClient, engine: FakeEngine) -> None:
    engine.fail_with = RuntimeError("lost the device")
    response = client.post("/generate_stream", json={"inputs": "a"})
    assert events(response.text) == [
        {
            "error": "Request failed during generation: lost the device",
            "error_type": "generation",
        }
    ]


def test_an_unsupported_parameter_in_a_stream_is_a_422_that_names_it(client: TestClient) -> None:
    body = {"inputs": "a", "parameters": {"adapter_id": "x"}}
    response = client.post("/generate_stream", json=body)
    assert response.status_code == 422
    assert "`adapter_id`" in response.json()["error"]


def test_tokenize_gives_places_in_utf8_bytes(client: TestClient) -> None:
    response = client.post("/tokenize", json={"inputs": "aé"})
    assert response.json() == [
        {"id": 64, "text": "a", "start": 0, "stop": 1},
        {"id": 127, "text": "é", "start": 1, "stop": 3},
        {"id": 102, "text": "é", "start": 1, "stop": 3},
    ]


def test_long_inputs_are_tokenised_the_same_way(client: TestClient) -> None:
    text = "ab" * 5000
    tokens = client.post("/tokenize", json={"inputs": text}).json()
    assert len(tokens) == len(text)
    assert tokens[-1] == {"id": 65, "text": "b", "start": 9999, "stop": 10000}
