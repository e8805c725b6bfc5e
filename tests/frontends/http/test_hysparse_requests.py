"""``hy_sparse_config`` in requests, and what answers tell of it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from fake_engine import FakeEngine
from starlette.testclient import TestClient
from transformers import PreTrainedTokenizerFast

from bicl.frontends.http.request import SparseOptions, SparseUsage
from bicl.sparse.settings import HySparseSettings

ENABLED = HySparseSettings(enable_hysparse=True)
TOLD = SparseUsage(
    0.65,
    tiles_read=35,
    tiles_total=100,
    mass_kept=0.95,
    entropy=3.5,
    entropy_by_group={"first": 4.0, "sparse": 3.5, "last": 2.5},
    shadow_steps=2,
    fallback="",
)
WIRE = {
    "sparsity_ratio": 0.65,
    "actual_sparsity_ratio": 0.65,
    "tiles_read": 35,
    "tiles_total": 100,
    "exercised": True,
    "attention_mass_kept": 0.95,
    "attention_entropy": 3.5,
    "attention_entropy_by_group": {"first": 4.0, "sparse": 3.5, "last": 2.5},
    "shadow_steps": 2,
    "fallback": None,
    "text_kind": None,
}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


class SparseEngine(FakeEngine):
    """Tells of HySparse in every answer."""

    told: SparseUsage = TOLD

    def _done(self, running: Any) -> Any:
        done = super()._done(running)
        return replace(done, usage=replace(done.usage, sparse=self.told))


@pytest.fixture
def sparse_engine(tokenizer: PreTrainedTokenizerFast) -> SparseEngine:
    return SparseEngine(tokenizer.decode)


@pytest.fixture
def enabled(make_client: Callable[..., TestClient], sparse_engine: SparseEngine) -> TestClient:
    return make_client(sparse_engine, hysparse=ENABLED)


def generate(client: TestClient, asked: Any, **parameters: Any) -> Any:
    body = {"max_new_tokens": 2, "details": True, "hy_sparse_config": asked} | parameters
    return client.post("/generate", json={"inputs": "hello", "parameters": body})


@pytest.mark.parametrize(
    ("asked", "options"),
    [
        (None, SparseOptions()),
        ({}, SparseOptions()),
        ({"sparsity_ratio": 0.7}, SparseOptions(0.7)),
        ({"sparsity_ratio": 0}, SparseOptions(0.0)),
        ({"sparsity_ratio": 0.5, "enable_sg": True}, SparseOptions(0.5, True)),
        ({"enable_sg": False}, SparseOptions(None, False)),
    ],
    ids=str,
)
def test_a_requests_wish_reaches_the_engine(
    enabled: TestClient, sparse_engine: SparseEngine, asked: Any, options: SparseOptions
) -> None:
    assert generate(enabled, asked).status_code == 200
    assert sparse_engine.requests[-1].params.sparse == options


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_openai_bodies_take_it_too(
    enabled: TestClient, sparse_engine: SparseEngine, route: str
) -> None:
    body = CHAT | {"prompt": "hi", "hy_sparse_config": {"sparsity_ratio": 0.4}}
    assert enabled.post(route, json=body).status_code == 200
    assert sparse_engine.requests[-1].params.sparse == SparseOptions(0.4)


@pytest.mark.parametrize(
    ("asked", "part"),
    [
        ({"sparsity_ratio": 0.96}, "use 0 (dense) to 0.95"),
        ({"sparsity_ratio": -0.1}, "use 0 (dense) to 0.95"),
    ],
    ids=str,
)
def test_ratios_out_of_range_are_refused_with_the_range(
    enabled: TestClient, asked: Any, part: str
) -> None:
    answer = generate(enabled, asked)
    assert answer.status_code == 422
    assert answer.json()["error_type"] == "validation"
    assert "`hy_sparse_config`" in answer.json()["error"]
    assert part in answer.json()["error"]


@pytest.mark.parametrize(
    "asked", [{"sparsity": 0.5}, {"sparsity_ratio": "0.5"}, {"enable_sg": 1}, [], "on"], ids=str
)
def test_other_shapes_are_no_request(enabled: TestClient, asked: Any) -> None:
    assert generate(enabled, asked).status_code == 422


@pytest.mark.parametrize("asked", [{"sparsity_ratio": 0.5}, {"enable_sg": True}], ids=str)
def test_a_server_without_it_refuses_by_name(client: TestClient, asked: Any) -> None:
    """(A72)"""
    answer = generate(client, asked)
    assert answer.status_code == 422
    assert "--enable-hysparse" in answer.json()["error"]


@pytest.mark.parametrize(
    "asked", [None, {}, {"sparsity_ratio": 0.0}, {"enable_sg": False}], ids=str
)
def test_a_server_without_it_takes_what_asks_for_nothing(client: TestClient, asked: Any) -> None:
    answer = generate(client, asked)
    assert answer.status_code == 200
    assert "hysparse" not in answer.json()["details"]


def test_long_prompts_are_read_off_the_event_loop(
    make_client: Callable[..., TestClient], sparse_engine: SparseEngine
) -> None:
    """Their kind and syntax may take a while; short ones are not read at all."""
    settings = HySparseSettings(enable_hysparse=True, hysparse_floor_tokens=64)
    client, threads = make_client(sparse_engine, hysparse=settings), []
    submit = sparse_engine.submit

    def spy(request: Any) -> Any:
        threads.append(threading.current_thread().name)
        return submit(request)

    sparse_engine.submit = spy
    for length in (10, 90):
        body = {"inputs": "a" * length, "parameters": {"max_new_tokens": 2}}
        assert client.post("/generate", json=body).status_code == 200
    assert threads[0] != threads[1]
    assert "pool" in threads[1].lower() or "asyncio" in threads[1]


def test_details_tell_what_it_did(enabled: TestClient) -> None:
    assert generate(enabled, None).json()["details"]["hysparse"] == WIRE


def test_the_last_event_of_a_stream_tells_it_too(enabled: TestClient) -> None:
    body = {"inputs": "hello", "parameters": {"max_new_tokens": 2, "details": True}}
    text = enabled.post("/generate_stream", json=body).text
    events = [json.loads(line[5:]) for line in text.splitlines() if line.startswith("data:")]
    assert events[-1]["details"]["hysparse"] == WIRE


@pytest.mark.parametrize("stream", [False, True])
def test_chat_usage_tells_it(enabled: TestClient, stream: bool) -> None:
    body = CHAT | {"stream": stream, "stream_options": {"include_usage": True}}
    answer = enabled.post("/v1/chat/completions", json=body)
    if not stream:
        assert answer.json()["usage"]["hysparse"] == WIRE
        return
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    assert json.loads(events[-1])["usage"]["hysparse"] == WIRE


def test_a_run_that_skipped_nothing_is_marked(
    enabled: TestClient, sparse_engine: SparseEngine
) -> None:
    """(A58)"""
    sparse_engine.told = SparseUsage(0.65, fallback="index")
    told = generate(enabled, None).json()["details"]["hysparse"]
    assert told["exercised"] is False
    assert told["attention_mass_kept"] is None
    assert told["fallback"] == "index"


def test_openapi_describes_it(client: TestClient) -> None:
    schemas = client.get("/api-doc/openapi.json").json()["components"]["schemas"]
    for name in ("GenerateParameters", "ChatRequest", "CompletionRequest"):
        assert "hy_sparse_config" in schemas[name]["properties"], name
    assert set(schemas["HySparseParameters"]["properties"]) == {"sparsity_ratio", "enable_sg"}
    assert "hysparse" in schemas["Details"]["properties"]
