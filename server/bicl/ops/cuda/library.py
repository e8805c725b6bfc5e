"""Finds, loads and checks the compiled kernels."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from bicl.errors import BackendError

__all__ = ["library_path", "module"]


def library_path() -> Path:
    """Where the kernels travel: in the wheel, or where ``make kernels`` puts them."""
    return Path(__file__).resolve().parents[2] / "lib" / "libbicl_kernels.so"


@functools.cache
def module() -> Any:
    """The loaded library. Loading needs no GPU and no driver.

    Raises:
        BackendError: it is missing or does not load; the message says what to do.
    """
    path = library_path()
    if not path.exists():
        raise BackendError(f"no compiled kernels at {path}; run `make kernels` (needs nvcc)")
    try:
        import tvm_ffi

        return tvm_ffi.load_module(str(path))
    except (ImportError, OSError, RuntimeError) as error:
        raise BackendError(f"the kernels at {path} do not load: {error}") from error
