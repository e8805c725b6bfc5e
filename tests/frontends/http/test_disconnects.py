"""A client that leaves, seen through real sockets."""

import json
import socket
from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest
from fake_engine import FakeEngine
from live import Live, serve_in_thread, wait_until

from bicl.config import ServerConfig
from bicl.frontends.http import sse
from bicl.frontends.http.app import create_app
from bicl.frontends.http.assembly import assemble


@pytest.fixture
def engine(tokenizer) -> Iterator[FakeEngine]:
    engine = FakeEngine(tokenizer.decode, tick=0.01)
    yield engine
    engine.stop()


@pytest.fixture
def live(engine: FakeEngine, tokenizer, config: ServerConfig) -> Iterator[Live]:
    config = replace(config, max_input_tokens=1000, max_total_tokens=50_000)
    state = assemble(replace(config, max_concurrent_requests=32), engine, tokenizer)
    with serve_in_thread(create_app(state)) as live:
        yield live
    assert state.inference._permits == 32


def send(live: Live, route: str, body: dict) -> socket.socket:
    payload = json.dumps(body).encode()
    head = (
        f"POST {route} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(payload)}\r\n\r\n"
    )
    connection = socket.create_connection(("127.0.0.1", live.port))
    connection.sendall(head.encode() + payload)
    return connection


LONG = {"max_new_tokens": 1000}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1000}
REQUESTS = [
    ("/generate", {"inputs": "a", "parameters": LONG}),
    ("/generate", {"inputs": "a", "parameters": {**LONG, "best_of": 2, "do_sample": True}}),
    ("/generate_stream", {"inputs": "a", "parameters": LONG}),
    ("/", {"inputs": "a", "parameters": LONG, "stream": True}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "stream": True}),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 1000}),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 1000, "stream": True}),
]


@pytest.mark.parametrize(("route", "body"), REQUESTS)
def test_a_client_that_leaves_ends_its_requests(
    live: Live, engine: FakeEngine, route: str, body: dict
) -> None:
    """(A30, A31)"""
    connection = send(live, route, body)
    wait_until(lambda: engine.snapshot().generated_tokens > 3)
    connection.close()
    wait_until(lambda: engine.snapshot().batch_size == 0)
    assert engine.snapshot().aborted == len(engine.requests)
    metrics = httpx.get(f"{live.url}/metrics").text
    assert 'tgi_request_failure{err="dropped"} 1.0' in metrics
    assert "tgi_request_success 0.0" in metrics


def test_half_the_streams_close_and_the_others_finish(live: Live, engine: FakeEngine) -> None:
    """(A30)"""
    body = {"inputs": "hello", "parameters": {"max_new_tokens": 60}}
    connections = [send(live, "/generate_stream", body) for _ in range(20)]
    wait_until(lambda: len(engine.requests) == 20)
    for connection in connections[::2]:
        connection.recv(4096)
        connection.close()
    for connection in connections[1::2]:
        text = b""
        while b'"generated_text":"' not in text:
            piece = connection.recv(65536)
            assert piece
            text += piece
        connection.close()
    wait_until(lambda: engine.snapshot().batch_size == 0)
    stats = engine.snapshot()
    assert stats.finished + stats.aborted == 20
    assert stats.finished >= 10
    assert httpx.get(f"{live.url}/health").status_code == 200


def test_a_silent_stream_is_kept_alive(
    live: Live, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_SECONDS", 0.05)
    engine._tick = 0.3
    body = {"inputs": "hello", "parameters": {"max_new_tokens": 2}}
    with httpx.stream("POST", f"{live.url}/generate_stream", json=body, timeout=30) as response:
        text = "".join(response.iter_text())
    blocks = text.split("\n\n")
    assert ":" in blocks
    assert len([block for block in blocks if block.startswith("data: ")]) == 2


def test_tokens_arrive_one_by_one(live: Live, engine: FakeEngine) -> None:
    body = {"inputs": "hello", "parameters": {"max_new_tokens": 5}}
    with httpx.stream("POST", f"{live.url}/generate_stream", json=body) as response:
        pieces = list(response.iter_raw())
    assert len(pieces) >= 4
