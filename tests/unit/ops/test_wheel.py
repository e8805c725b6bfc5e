"""The compiled kernels travel in the wheel, and what NVRTC compiles where they do not fit."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from bicl.ops.cuda import library

SERVER = Path(__file__).resolve().parents[3] / "server"
FOLDER = "/".join(library.library_path().parts[-3:-1])
BUILT = tuple(
    f"{FOLDER}/{name}"
    for name in ("libbicl_kernels.so", "libbicl_kernels.json", "kernel_sources.json")
)


def test_a_wheel_has_the_library_its_report_and_its_sources(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    tree = tmp_path / "server"
    shutil.copytree(SERVER, tree, ignore=shutil.ignore_patterns("lib", "*.egg-info", "build"))
    for name in BUILT:
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).write_text("built")
    build = "import sys; from setuptools import build_meta as b; b.build_wheel(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", build, tmp_path], cwd=tree, check=True, capture_output=True
    )
    (wheel,) = tmp_path.glob("*.whl")
    assert set(BUILT) <= set(zipfile.ZipFile(wheel).namelist())
