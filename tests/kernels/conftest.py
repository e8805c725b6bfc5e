"""Kernel tests run on a GPU, in float32 where they compute the truth."""

import pytest
import torch

from bicl.attention.cuda import CudaBackend
from bicl.ops.cuda import library


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """The CPU only makes inputs; threads of many test processes would wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _exact_truth() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture(scope="session", autouse=True)
def _source_of_kernels(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--kernels-from") == "nvrtc":
        library.compile_on_the_spot(torch.cuda.get_device_capability())


@pytest.fixture(scope="session")
def backend() -> CudaBackend:
    return CudaBackend()


@pytest.fixture(scope="session")
def deterministic_backend() -> CudaBackend:
    return CudaBackend(deterministic=True)
