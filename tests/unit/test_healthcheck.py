"""The images' health check asks the port that the server was given."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from bicl import healthcheck


@pytest.mark.parametrize(
    ("command", "environ", "port"),
    [
        ("bicl serve --model-id bundled", {"PORT": "8080"}, "8080"),
        ("text-generation-launcher --model-id m", {}, "80"),
        ("text-generation-launcher --model-id m --port 3000", {"PORT": "80"}, "3000"),
        ("text-generation-launcher --port=3000 --model-id m", {"PORT": "80"}, "3000"),
        ("/sbin/docker-init -- /tgi-entrypoint.sh -p 3001", {"PORT": "80"}, "3001"),
        ("text-generation-launcher -p3002", {"PORT": "80"}, "3002"),
    ],
)
def test_a_flag_wins_over_the_environment(command: str, environ: dict[str, str], port: str) -> None:
    assert healthcheck.port_of(command.split(), environ) == port


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """A server behind ``PORT`` whose status can be chosen."""
    chosen = {"/health": 200}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(chosen.get(self.path, 404))
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        monkeypatch.setattr(healthcheck, "port_of", lambda *_: str(server.server_port))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield chosen
        server.shutdown()


def test_it_passes_while_the_server_is_well_and_fails_when_it_is_not(
    answers: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert healthcheck.main() == 0
    answers["/health"] = 503
    assert healthcheck.main() == 1
    assert "/health: HTTP Error 503" in capsys.readouterr().err


def test_a_closed_port_is_a_failure_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for port in ("1", "no number"):
        monkeypatch.setattr(healthcheck, "port_of", lambda *_, port=port: port)
        assert healthcheck.main() == 1
        assert f"http://127.0.0.1:{port}/health" in capsys.readouterr().err
