"""SIGTERM to a real process with streams running (A67)."""

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fake_server
import httpx
import pytest
from live import wait_until

# One process imports everything; the servers are forked from it.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["fake_server"])


@pytest.fixture(autouse=True, scope="module")
def _preloaded() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        yield


@contextmanager
def server(grace: float, tick: float, dies_after: float | None = None) -> Iterator[tuple[Any, str]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = CONTEXT.Process(target=fake_server.main, args=(port, grace, tick, dies_after))
    process.start()
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: answers(url), timeout=60)
        yield process, url
    finally:
        process.kill()
        process.join()


def exit_code(process: Any) -> int | None:
    process.join(20)
    return process.exitcode


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=1).status_code == 200
    except httpx.TransportError:
        return False


class Stream(threading.Thread):
    def __init__(self, url: str, tokens: int) -> None:
        super().__init__()
        self.url, self.tokens = url, tokens
        self.events: list[dict] = []
        self.start()

    def run(self) -> None:
        body = {"inputs": "hello", "parameters": {"max_new_tokens": self.tokens}}
        url = f"{self.url}/generate_stream"
        with (
            contextlib.suppress(httpx.TransportError),  # cut off in the middle
            httpx.stream("POST", url, json=body, timeout=60) as response,
        ):
            for line in response.iter_lines():
                if line.startswith("data: "):
                    self.events.append(json.loads(line.removeprefix("data: ")))


def test_streams_finish_new_requests_get_503_and_the_exit_is_0() -> None:
    """(A67)"""
    with server(grace=30, tick=0.01) as (process, url):
        streams = [Stream(url, tokens=150) for _ in range(3)]
        wait_until(lambda: all(stream.events for stream in streams))
        os.kill(process.pid, signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{url}/ready").status_code == 503)
        assert httpx.get(f"{url}/health").status_code == 200
        refused = httpx.post(f"{url}/generate", json={"inputs": "a"})
        assert refused.status_code == 503
        for stream in streams:
            stream.join(30)
            assert len(stream.events) == 150
            assert stream.events[-1]["generated_text"] is not None
        assert exit_code(process) == 0


def test_streams_beyond_the_grace_end_with_an_error_event() -> None:
    """(A67)"""
    with server(grace=0.5, tick=0.01) as (process, url):
        stream = Stream(url, tokens=90_000)
        wait_until(lambda: bool(stream.events))
        os.kill(process.pid, signal.SIGTERM)
        stream.join(20)
        assert stream.events[-1]["error_type"] == "generation"
        assert exit_code(process) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_server_ends_at_once_with_0(number: signal.Signals) -> None:
    with server(grace=60, tick=0.01) as (process, _):
        os.kill(process.pid, number)
        assert exit_code(process) == 0


def test_a_second_signal_does_not_wait() -> None:
    with server(grace=60, tick=0.01) as (process, url):
        stream = Stream(url, tokens=90_000)
        wait_until(lambda: bool(stream.events))
        os.kill(process.pid, signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{url}/ready").status_code == 503)
        os.kill(process.pid, signal.SIGTERM)
        assert exit_code(process) == 0
        stream.join(10)


def test_a_server_whose_engine_ended_stops_with_an_error() -> None:
    """(A68)"""
    with server(grace=60, tick=0.01, dies_after=1.0) as (process, _):
        assert exit_code(process) == fake_server.ENGINE_FAILED
