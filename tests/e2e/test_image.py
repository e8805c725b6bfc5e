"""The embedded image, built by a real engine and driven from outside through Compose."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from engine import ENVIRONMENT, ROOT, build_embedded, docker, run, succeeds

import bicl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

PORT = "18080"
URL = f"http://127.0.0.1:{PORT}"
PROJECT = "bicl-test"


@pytest.fixture(scope="module")
def client() -> str:
    return docker()


@pytest.fixture(scope="module")
def image(client: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_embedded(client, tmp_path_factory.mktemp("context"))


def compose(*arguments: str) -> str:
    program = ["docker-compose"] if shutil.which("docker-compose") else ["docker", "compose"]
    command = [*program, "-p", PROJECT, "-f", str(ROOT / "docker-compose.yml"), *arguments]
    done = subprocess.run(
        command, text=True, capture_output=True, env=ENVIRONMENT | {"PORT": PORT}, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def wait_until_ready(url: str, seconds: float = 180) -> float:
    start = time.monotonic()
    while time.monotonic() - start < seconds:
        try:
            if httpx.get(f"{url}/ready").status_code == 200:
                return time.monotonic() - start
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise AssertionError(f"{url} was not ready within {seconds} s")


@pytest.fixture
def container(image: str) -> Iterator[str]:
    """The service `embedded`, up and ready; the container's id."""
    try:
        compose("up", "-d", "--no-build", "embedded")
        wait_until_ready(URL)
        yield compose("ps", "-q", "embedded").strip()
    finally:
        compose("down", "-v")


def generate(tokens: int, **more: object) -> httpx.Response:
    body = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": tokens, **more}}
    return httpx.post(f"{URL}/generate", json=body, timeout=60)


def stream(tokens: int) -> list[dict]:
    body = {"inputs": "Once upon a time", "parameters": {"max_new_tokens": tokens}}
    with httpx.stream("POST", f"{URL}/generate_stream", json=body, timeout=120) as response:
        lines = [line for line in response.iter_lines() if line.startswith("data:")]
    return [json.loads(line.removeprefix("data:")) for line in lines]


def test_compose_serves_the_bundled_model_as_an_unprivileged_user(
    client: str, container: str
) -> None:
    assert "Paris" in generate(5).json()["generated_text"]
    events = stream(8)
    assert len(events) == 8
    assert events[-1]["generated_text"] is not None
    assert httpx.get(f"{URL}/health").status_code == 200
    assert "tgi_request_count 2" in httpx.get(f"{URL}/metrics").text
    assert run(client, "exec", container, "id", "-u").strip() == "10001"
    for path in ("/opt/bicl/x", "/x", "/usr/x"):
        assert not succeeds(client, "exec", container, "touch", path), path


def test_sigterm_lets_a_running_stream_finish_and_exits_cleanly(
    client: str, container: str
) -> None:
    """(A67)"""
    events: list[dict] = []
    reader = threading.Thread(target=lambda: events.extend(stream(100)))
    reader.start()
    while "tgi_batch_current_size 1" not in httpx.get(f"{URL}/metrics").text:
        time.sleep(0.02)
    run(client, "stop", "-t", "60", container)
    reader.join(10)
    assert len(events) == 100
    assert events[-1]["generated_text"] is not None
    assert run(client, "inspect", "-f", "{{.State.ExitCode}}", container).strip() == "0"


def test_disk_that_fills_up_does_not_stop_the_server(client: str, image: str) -> None:
    name = f"{PROJECT}-full"
    try:
        run(
            client, "run", "-d", "--name", name, "-p", f"{PORT}:8080", "--read-only",
            "--tmpfs", "/tmp:size=1m", "--tmpfs", "/data:size=64k,uid=10001", image,
        )  # fmt: skip
        wait_until_ready(URL)
        for folder in ("/tmp", "/data"):
            fill = f"dd if=/dev/zero of={folder}/fill bs=4k; echo x > {folder}/x"
            assert not succeeds(client, "exec", name, "sh", "-c", fill), folder
        assert generate(5).status_code == 200
        assert stream(5)[-1]["generated_text"] is not None
        assert httpx.get(f"{URL}/metrics").status_code == 200
    finally:
        succeeds(client, "rm", "-f", name)


def test_image_carries_its_parts_list_and_no_compiler(client: str, image: str) -> None:
    bom = run(client, "run", "--rm", "--entrypoint", "cat", image, "/opt/bicl/sbom.cdx.json")
    parts = {part["name"]: part.get("version") for part in json.loads(bom)["components"]}
    assert json.loads(bom)["bomFormat"] == "CycloneDX"
    assert parts["torch"] == "2.13.0+cpu"
    assert {"bicl", "fastapi", "llguidance"} <= set(parts)
    for tool in ("gcc", "cc", "nvcc", "make"):
        assert not succeeds(client, "run", "--rm", "--entrypoint", "which", image, tool), tool


def test_wrong_flags_end_the_container_with_one_clear_message(client: str, image: str) -> None:
    """(A47)"""
    done = subprocess.run(
        [client, "run", "--rm", image, "--model-id", "bundled", "--block-size", "48"],
        capture_output=True, text=True, env=dict(os.environ),
    )  # fmt: skip
    assert done.returncode != 0
    assert "48" in done.stderr
    assert "64" in done.stderr
    assert "Traceback" not in done.stderr


def test_dockerfile_has_both_targets_a_health_check_and_an_unprivileged_user() -> None:
    text = Path(ROOT / "Dockerfile").read_text()
    for stage in ("AS embedded", "AS tgi", "HEALTHCHECK", "USER 10001"):
        assert stage in text


def test_health_is_asked_where_the_flag_says(client: str, image: str) -> None:
    name = "bicl-test-health"
    try:
        run(client, "run", "-d", "--name", name, image, "--model-id", "bundled", "--port", "9000")
        for _ in range(90):
            told = run(client, "inspect", "-f", "{{.State.Health.Status}}", name).strip()
            if told == "healthy":
                break
            time.sleep(1)
        assert told == "healthy"
    finally:
        succeeds(client, "rm", "-f", name)


def test_image_and_chart_are_of_this_release() -> None:
    assert f"ARG VERSION={bicl.__version__}\n" in (ROOT / "Dockerfile").read_text()
    chart = yaml.safe_load((ROOT / "deploy/helm/bicl/Chart.yaml").read_text())
    values = yaml.safe_load((ROOT / "deploy/helm/bicl/values.yaml").read_text())
    assert chart["appVersion"] == values["image"]["tag"] == bicl.__version__


@pytest.mark.parametrize("name", ["embedded", "tgi"])
def test_compose_passes_no_empty_token_on(name: str) -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    assert services[name]["environment"]["HF_TOKEN"] is None, "as the shell has it, or not at all"
