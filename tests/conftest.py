"""Seeds, the GPU marker, and thread limits shared by all tests."""

import os
import random

import numpy as np
import pytest
import torch

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kernels-from",
        choices=("build", "nvrtc"),
        default="build",
        help="nvrtc: compile each kernel on the card, as for a card that the build has no code for",
    )


def gpu_reason() -> str | None:
    """Why GPU tests cannot run here, or None if they can."""
    if not torch.cuda.is_available():
        return "no CUDA device on this machine"
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        return f"compute capability {major}.{minor}; 8.0 or newer is needed"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = gpu_reason()
    if reason is None:
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
