"""Finding, loading and judging the compiled kernels, on a machine without a GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from bicl.errors import BackendError
from bicl.ops.cuda import library

RELEASE = ("80", "86", "89", "90a", "ptx")
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
needs_library = pytest.mark.skipif(
    not library.library_path().exists(), reason="kernels are not built: run `make kernels`"
)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_a_release_fits_every_supported_card(capability: tuple[int, int]) -> None:
    assert library.missing_arch(capability, RELEASE) is None  # (A46)


@pytest.mark.parametrize(
    ("capability", "archs", "lacking"),
    [
        ((9, 0), ("80",), "90a"),
        ((8, 0), ("90a",), "80"),
        ((8, 6), ("80",), None),
        ((8, 9), ("89",), None),
        ((8, 0), ("89",), "80"),
        ((10, 0), ("80", "90a"), "ptx"),
    ],
)
def test_what_a_partial_build_lacks_is_named(
    capability: tuple[int, int], archs: tuple[str, ...], lacking: str | None
) -> None:
    assert library.missing_arch(capability, archs) == lacking


@needs_no_gpu
def test_without_a_gpu_the_error_names_the_remedy() -> None:
    with pytest.raises(BackendError, match="use device 'cpu'"):
        library.require_device()


def test_a_missing_library_names_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(library, "library_path", lambda: tmp_path / "none.so")
    with pytest.raises(BackendError, match="make kernels"):
        library.module.__wrapped__()


def test_a_broken_library_is_a_backend_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(library, "library_path", lambda: broken)
    with pytest.raises(BackendError, match="do not load"):
        library.module.__wrapped__()


@needs_library
def test_the_library_says_what_it_was_built_for() -> None:
    assert set(library.built_archs()) <= {*RELEASE, "90"}


def test_the_tests_of_kernels_from_nvrtc_exist() -> None:
    """They run on a card only, so nothing else here would notice that one was moved."""
    folder = Path(__file__).resolve().parents[2] / "kernels"
    text = (folder / "test_nvrtc_on_cuda.py").read_text()
    named = re.findall(r"(test_\w+\.py)::(test_\w+)", text)
    assert named
    missing = [name for name in named if f"def {name[1]}(" not in (folder / name[0]).read_text()]
    assert not missing
