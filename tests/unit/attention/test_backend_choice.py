"""Choosing a backend: once, by device, never silently another."""

from __future__ import annotations

import pytest
import torch

from bicl.attention.backend import BACKENDS, AttentionBackend, make_backend
from bicl.errors import BackendError


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_cpu_backend_is_made_by_device(device: str | torch.device) -> None:
    backend: AttentionBackend = make_backend(device)
    assert backend.name == "cpu"


def test_unknown_device_names_the_choices() -> None:
    with pytest.raises(BackendError, match=r"no attention backend 'tpu'.*cpu"):
        make_backend("tpu")


def test_backend_missing_from_the_build_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "cuda", "bicl.attention.absent:Backend")
    with pytest.raises(BackendError, match=r"no cuda backend .*absent is missing"):
        make_backend("cuda:1")


def test_backend_is_imported_only_when_chosen() -> None:
    import subprocess
    import sys

    code = (
        "import sys, bicl.attention.backend as b; assert 'bicl.attention.cpu' not in sys.modules;"
        "b.make_backend('cpu'); assert 'bicl.attention.cpu' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
