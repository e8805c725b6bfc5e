"""Device code that only counts and sorts, compiled for the CPU: threads are a warp or a CTA."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

__all__ = ["compile_device_code"]

_SUPPORT = Path(__file__).resolve().parent
_CSRC = _SUPPORT.parents[1] / "csrc"


def compile_device_code(
    folder: Path, program: str, operator: str, headers: Iterable[str], without: Iterable[str]
) -> Callable[..., list[tuple[int, ...]]]:
    """Compile ``tests/support/{program}.cpp`` with headers of an operator; skips without g++.

    Args:
        folder: an empty one, for what is built.
        operator: its folder in ``csrc``.
        headers: of it, those that the program needs.
        without: their includes that only CUDA can read.

    Returns:
        A function that runs the program with numbers as its arguments and returns the numbers that
        it prints, line by line; the program ends with an error if its own checks fail.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    for name in headers:
        text = (_CSRC / operator / name).read_text()
        for include in without:
            text = text.replace(f"#include {include}", "")
        text = text.replace('"../common/', f'"{_CSRC}/common/')
        (folder / name).write_text(text.replace('"../params.h"', f'"{_CSRC}/params.h"'))
    binary = folder / program
    command = (compiler, "-std=c++20", "-O1", "-pthread", "-w", "-I", folder, "-I", _SUPPORT)
    source = _SUPPORT / f"{program}.cpp"
    done = subprocess.run([*command, "-o", binary, source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    def run(*numbers: int) -> list[tuple[int, ...]]:
        done = subprocess.run(
            [binary, *map(str, numbers)], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return [tuple(map(int, line.split())) for line in done.stdout.splitlines()]

    return run
