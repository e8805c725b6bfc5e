"""Kernel tests run on a GPU, in float32 where they compute the truth."""

import pytest
import torch

from bicl.attention.cuda import CudaBackend


@pytest.fixture(autouse=True)
def _exact_truth() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture(scope="session")
def backend() -> CudaBackend:
    return CudaBackend()


@pytest.fixture(scope="session")
def deterministic_backend() -> CudaBackend:
    return CudaBackend(deterministic=True)
