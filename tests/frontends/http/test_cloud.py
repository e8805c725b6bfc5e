"""``/invocations`` and ``/vertex``."""

import pytest
from fake_engine import FakeEngine
from starlette.testclient import TestClient

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/", {"inputs": "hello", "parameters": {"max_new_tokens": 2}}),
        ("/v1/completions", {"prompt": "hello", "max_tokens": 2}),
        ("/v1/chat/completions", CHAT),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_invocations_answers_by_the_shape_of_the_body(
    client: TestClient, route: str, body: dict, stream: bool
) -> None:
    def ask(where: str) -> tuple[int, str]:
        response = client.post(where, json={**body, "stream": stream})
        return response.status_code, response.headers["content-type"]

    assert ask("/invocations") == ask(route)
    usual = client.post(route, json=body).json()
    there = client.post("/invocations", json=body).json()
    if isinstance(usual, dict):
        usual.pop("created")
        there.pop("created")
    assert usual == there


def test_invocations_of_no_known_shape_is_422(client: TestClient) -> None:
    assert client.post("/invocations", json={"text": "hello"}).status_code == 422


def test_vertex_answers_prompts_and_conversations_in_order(client: TestClient) -> None:
    prompt = {"inputs": "hello", "parameters": {"max_new_tokens": 3}}
    response = client.post("/vertex", json={"instances": [prompt, CHAT]})
    assert response.json() == {"predictions": ["hel", "<u"]}


def test_vertex_samples_as_tgi_does(client: TestClient, engine: FakeEngine) -> None:
    client.post("/vertex", json={"instances": [{"inputs": "a"}]})
    assert engine.requests[0].params.do_sample


def test_vertex_without_instances_is_422_and_with_a_bad_one_500(
    client: TestClient, engine: FakeEngine
) -> None:
    assert client.post("/vertex", json={"instances": []}).status_code == 422
    bad = {"inputs": "x" * 500}
    response = client.post("/vertex", json={"instances": [{"inputs": "a"}, bad]})
    assert response.status_code == 500
    assert response.json()["error"] == "Incomplete generation"
    assert engine.snapshot().batch_size == 0
