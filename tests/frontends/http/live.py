"""Real sockets: a server on a fake engine, in this process or as one of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import uvicorn
from starlette.applications import Starlette

from bicl.config import settings
from bicl.frontends.http.listener import bind

__all__ = ["Live", "ServeProcess", "bicl_serve", "serve_in_thread", "wait_until"]


@dataclass(frozen=True)
class Live:
    url: str
    port: int


def wait_until(condition, timeout: float = 10.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.01)


@contextmanager
def serve_in_thread(app: Starlette) -> Iterator[Live]:
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{port}"
    wait_until(lambda: _answers(url))
    try:
        yield Live(url, port)
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=1).status_code == 200
    except httpx.TransportError:
        return False


@dataclass(frozen=True)
class ServeProcess:
    url: str
    process: subprocess.Popen[bytes]
    log: Path


@contextmanager
def bicl_serve(log: Path, *flags: str) -> Iterator[ServeProcess]:
    """The real command in a process of its own, ready to answer."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "bicl", "serve", "--hostname=127.0.0.1", f"--port={port}"]
    ours = {each.env for each in settings()}
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ours and not name.startswith("BICL_")
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *flags], stdout=output, stderr=output, env=environment
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: process.poll() is not None or _answers(url), timeout=240)
        assert process.poll() is None, log.read_text()
        yield ServeProcess(url, process, log)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
