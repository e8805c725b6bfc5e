"""Unit tests: one thread, because a second only waits for tensors so small, and repeatable
property tests, the same examples in every run and no failure because a machine was busy."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
