"""Kernels compiled on the spot: what NVRTC is asked for. It needs no GPU."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bicl.errors import BackendError
from bicl.ops.cuda import nvrtc

CSRC = Path(__file__).resolve().parents[3] / "csrc"
pytest.importorskip("cupy", reason="CuPy is not installed; it brings NVRTC's binding")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    files = [*CSRC.rglob("*.cuh"), *CSRC.rglob("*.h")]
    path = tmp_path / "kernel_sources.json"
    path.write_text(json.dumps({str(f.relative_to(CSRC)): f.read_text() for f in files}))
    return path


@pytest.fixture
def compiler(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> nvrtc.KernelCompiler:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    try:
        return nvrtc.KernelCompiler(sources, (8, 7))
    except BackendError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("tag", "expression"),
    [
        ("bicl::KernelTag<&bicl::copy_pages_kernel>", "bicl::copy_pages_kernel"),
        (
            "bicl::KernelTag<&(void bicl::gather_kernel<__half, float>(bicl::GatherParams, "
            "bicl::FastDiv, bicl::FastDiv))>",
            "bicl::gather_kernel<__half, float>",
        ),
        (
            "bicl::KernelTag<&(void bicl::sparse::tiles_kernel<__half, 1, (bicl::sparse::Work)2>"
            "(bicl::sparse::TilesKernelParams))>",
            "bicl::sparse::tiles_kernel<__half, 1, (bicl::sparse::Work)2>",
        ),
    ],
)
def test_the_library_spells_the_kernel_it_needs(tag: str, expression: str) -> None:
    assert nvrtc.name_expression(tag) == expression


def test_another_name_is_refused() -> None:
    with pytest.raises(BackendError, match="does not name a kernel"):
        nvrtc.name_expression("std::vector<int>")


def test_every_kernel_has_a_source() -> None:
    kernel = re.compile(r"__global__[^;{]*?\b(\w+)\(\s*const __grid_constant__", re.S)
    defined = {
        (str(path.relative_to(CSRC)), name)
        for path in CSRC.rglob("*.cu*")
        for name in kernel.findall(path.read_text())
    }
    listed = {(header, name.rpartition("::")[2]) for name, header in nvrtc.HEADERS.items()}
    assert defined == listed


def test_a_kernel_is_compiled_once_and_kept(
    compiler: nvrtc.KernelCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    tag = "bicl::KernelTag<&bicl::copy_pages_kernel>"
    symbol, _, image = compiler(tag).partition(b"\0")
    assert symbol.startswith(b"_ZN4bicl17copy_pages_kernel")
    assert image.startswith(b"\x7fELF")
    monkeypatch.setattr(compiler, "_compile", lambda expression: pytest.fail("compiled again"))
    assert compiler(tag) == symbol + b"\0" + image


def test_what_does_not_compile_is_told_with_the_compilers_words(
    compiler: nvrtc.KernelCompiler,
) -> None:
    with pytest.raises(BackendError, match="sm_87"):
        compiler("bicl::KernelTag<&(void bicl::gather_kernel<__half, nonsense>())>")
