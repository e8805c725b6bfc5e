"""Bodies that never become a request: axum's statuses and plain text."""

import pytest
from fake_engine import FakeEngine
from starlette.testclient import TestClient

JSON = {"content-type": "application/json"}
ROUTES = ["/", "/generate", "/generate_stream", "/v1/chat/completions", "/v1/completions"]


@pytest.mark.parametrize("route", [*ROUTES, "/tokenize", "/chat_tokenize"])
def test_a_body_that_is_not_declared_as_json_is_415(client: TestClient, route: str) -> None:
    for headers in ({}, {"content-type": "text/plain"}):
        response = client.post(route, content=b'{"inputs":"a"}', headers=headers)
        assert response.status_code == 415
        assert response.text == "Expected request with `Content-Type: application/json`"


@pytest.mark.parametrize(
    "kind", ["application/json; charset=utf-8", "application/cloudevents+json", "APPLICATION/JSON"]
)
def test_other_spellings_of_json_are_taken(client: TestClient, kind: str) -> None:
    response = client.post("/generate", content=b'{"inputs":"a"}', headers={"content-type": kind})
    assert response.status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b'{"inputs": "a",}',
        b'{"inputs": NaN}',
        b'{"inputs": "a", "parameters": {"temperature": Infinity}}',
        b'{"inputs": "a", "parameters": {"temperature": 1e400}}',
        b'{"inputs": "\\ud800"}',
        b'{"inputs": "\xff"}',
        b"[" * 5000,
        b'{"inputs": "a"} trailing',
    ],
)
@pytest.mark.parametrize("route", ROUTES)
def test_text_that_is_no_json_is_400(
    client: TestClient, engine: FakeEngine, route: str, body: bytes
) -> None:
    response = client.post(route, content=body, headers=JSON)
    assert response.status_code == 400, response.text
    assert response.text.startswith("Failed to parse the request body as JSON: ")
    assert response.headers["content-type"].startswith("text/plain")
    assert engine.requests == []


WRONG_SHAPES = [
    "{}",
    "[]",
    "null",
    '"a"',
    '{"inputs": 1}',
    '{"inputs": null}',
    '{"inputs": ["a"]}',
    '{"inputs": "a", "parameters": null}',
    '{"inputs": "a", "parameters": []}',
    '{"inputs": "a", "parameters": {"temperature": "0.5"}}',
    '{"inputs": "a", "parameters": {"temperature": true}}',
    '{"inputs": "a", "parameters": {"do_sample": 1}}',
    '{"inputs": "a", "parameters": {"do_sample": null}}',
    '{"inputs": "a", "parameters": {"details": "true"}}',
    '{"inputs": "a", "parameters": {"stop": null}}',
    '{"inputs": "a", "parameters": {"stop": "x"}}',
    '{"inputs": "a", "parameters": {"stop": [1]}}',
    '{"inputs": "a", "parameters": {"max_new_tokens": -1}}',
    '{"inputs": "a", "parameters": {"max_new_tokens": 1.0}}',
    '{"inputs": "a", "parameters": {"max_new_tokens": 4294967296}}',
    '{"inputs": "a", "parameters": {"top_k": 2147483648}}',
    '{"inputs": "a", "parameters": {"seed": -1}}',
    '{"inputs": "a", "parameters": {"seed": 18446744073709551616}}',
    '{"inputs": "a", "parameters": {"grammar": "x"}}',
    '{"inputs": "a", "parameters": {"grammar": {"type": "cfg", "value": ""}}}',
    '{"inputs": "a", "parameters": {"grammar": {"type": "regex"}}}',
    '{"inputs": "a", "parameters": {"grammar": {"type": "json_schema", "value": {}}}}',
]


@pytest.mark.parametrize("body", WRONG_SHAPES)
def test_json_of_another_shape_is_422_in_plain_text(
    client: TestClient, engine: FakeEngine, body: str
) -> None:
    response = client.post("/generate", content=body, headers=JSON)
    assert response.status_code == 422, response.text
    start = "Failed to deserialize the JSON body into the target type: "
    assert response.text.startswith(start)
    assert response.headers["content-type"].startswith("text/plain")
    assert engine.requests == []


def test_the_path_of_the_wrong_field_is_named(client: TestClient) -> None:
    body = {"inputs": "a", "parameters": {"stop": ["x", 2]}}
    assert "parameters.stop.1: " in client.post("/generate", json=body).text


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"content": "hi"}]},
        {"messages": [{"role": "user", "content": [{"type": "audio"}]}]},
        {"messages": "hi"},
        {"messages": [], "stream_options": None},
        {"messages": [], "tools": [{"type": "function"}]},
        {"messages": [], "max_tokens": -1},
        {},
    ],
)
def test_chat_of_another_shape_is_422(client: TestClient, body: dict) -> None:
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 422, response.text
    assert response.headers["content-type"].startswith("text/plain")


def test_an_empty_list_of_prompts_is_422(client: TestClient) -> None:
    response = client.post("/v1/completions", json={"prompt": []})
    assert response.status_code == 422
    assert "Do not use an empty array for the prompt." in response.text


def test_unknown_fields_are_ignored(client: TestClient) -> None:
    body = {"inputs": "a", "new": 1, "parameters": {"max_new_tokens": 1, "newer": {}}}
    assert client.post("/generate", json=body).status_code == 200


def test_a_body_above_the_payload_limit_is_413(make_client) -> None:
    client = make_client(payload_limit=100)
    small = client.post("/tokenize", json={"inputs": "x" * 50})
    assert small.status_code == 200

    def chunks():  # without a content-length the limit must hold, too
        yield b'{"inputs": "'
        yield b"x" * 200
        yield b'"}'

    for body in (b'{"inputs": "' + b"x" * 200 + b'"}', chunks()):
        response = client.post("/tokenize", content=body, headers=JSON)
        assert response.status_code == 413
        assert response.text == "Failed to buffer the request body: length limit exceeded"


def test_unknown_routes_and_methods_have_empty_answers(client: TestClient) -> None:
    assert (client.get("/nothing").status_code, client.get("/nothing").text) == (404, "")
    assert (client.get("/generate").status_code, client.get("/generate").text) == (405, "")


def test_an_api_key_guards_generation_and_leaves_operations_open(make_client) -> None:
    client = make_client(api_key="sesame")
    body = {"inputs": "a", "parameters": {"max_new_tokens": 1}}
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "sesame"}):
        response = client.post("/generate", json=body, headers=headers)
        assert (response.status_code, response.text) == (401, "")
    good = client.post("/generate", json=body, headers={"authorization": "Bearer sesame"})
    assert good.status_code == 200
    for route in ("/health", "/ready", "/info", "/metrics", "/v1/models", "/"):
        assert client.get(route).status_code == 200
