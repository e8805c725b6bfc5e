"""Finds, loads and checks the compiled kernels."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import torch

from bicl.errors import BackendError
from bicl.ops.cuda import nvrtc

__all__ = [
    "built_archs",
    "compile_on_the_spot",
    "kernels_from",
    "library_path",
    "module",
    "require_device",
]

log = logging.getLogger(__name__)


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


def built_archs() -> tuple[str, ...]:
    """The cards the library was compiled for: ``80``, ``86``, ``89``, ``90a``, ``ptx``."""
    return tuple(str(module().built_archs()).split(","))


def missing_arch(capability: tuple[int, int], archs: tuple[str, ...]) -> str | None:
    """What ``--arch`` lacks for a card of this compute capability, or None if it fits."""
    major, minor = capability
    if major == 8:
        return None if {"80", f"8{minor}"} & set(archs) else "80"
    if (major, minor) == (9, 0):
        return None if "90a" in archs else "90a"
    return None if "ptx" in archs else "ptx"


def require_device(device: torch.device | str = "cuda") -> None:
    """Check at start that the kernels run on ``device``.

    Raises:
        BackendError: naming what is missing and the remedy.
    """
    if torch.version.cuda is None:
        raise BackendError(
            f"this torch ({torch.__version__}) was built without CUDA; install one with it, "
            "or use device 'cpu'"
        )
    if not torch.cuda.is_available():
        raise BackendError(
            "no CUDA device is visible; check the driver with nvidia-smi, CUDA_VISIBLE_DEVICES, "
            "and that the container was started with --gpus, or use device 'cpu'"
        )
    capability = torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device)
    if capability < (8, 0):
        raise BackendError(
            f"{name} has compute capability {capability[0]}.{capability[1]}; 8.0 or newer is "
            "needed (A100, L4, RTX 30 or later); use device 'cpu'"
        )
    if lacking := missing_arch(capability, built_archs()):
        problem = (
            f"the kernels were compiled for {','.join(built_archs())}, but {name} (compute "
            f"capability {capability[0]}.{capability[1]}) needs {lacking}"
        )
        try:
            compile_on_the_spot(capability)
        except BackendError as error:
            raise BackendError(
                f"{problem}, and they cannot be compiled on the spot: {error}; rebuild with "
                f"`python csrc/build.py --arch {lacking}`, or use device 'cpu'"
            ) from error
        log.warning("%s; each is compiled when it is first needed, and kept", problem)


@functools.cache
def compile_on_the_spot(capability: tuple[int, int]) -> None:
    """Replace every kernel by what NVRTC makes for this card, for the rest of the process.

    Raises:
        BackendError: CuPy, the CUDA headers or the kernels' sources are missing.
    """
    compiler = nvrtc.KernelCompiler(library_path().with_name("kernel_sources.json"), capability)
    module().set_kernel_compiler(compiler)


def kernels_from() -> str:
    """Where kernels come from: ``build``, or ``nvrtc`` where the build has no code for the card."""
    return "nvrtc" if compile_on_the_spot.cache_info().currsize else "build"
