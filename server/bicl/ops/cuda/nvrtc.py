"""Compiles kernels on the spot where the library has no code for the card.

The library names the kernel it is about to launch for the first time; NVRTC (through CuPy) makes it
from the sources that travel beside the library, and the result is kept in CuPy's kernel cache
(``CUPY_CACHE_DIR``, by default ``~/.cupy/kernel_cache``). A kernel takes 2 to 30 seconds the first
time on a machine and milliseconds from then on.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any

from bicl.config import environment
from bicl.errors import BackendError

__all__ = ["HEADERS", "KernelCompiler", "name_expression"]

log = logging.getLogger(__name__)

HEADERS = {
    "bicl::store_kv_kernel": "store_kv/kernel.cuh",
    "bicl::gather_kernel": "gather/kernel.cuh",
    "bicl::copy_pages_kernel": "copy_pages/kernel.cuh",
    "bicl::rotate_and_store_kernel": "rotate_and_store/kernel.cuh",
    "bicl::small_copies_kernel": "small_copies/kernel.cuh",
    "bicl::stage_step_kernel": "stage_step/kernel.cuh",
    "bicl::rms_norm_kernel": "rms_norm/kernel.cuh",
    "bicl::few_rows_linear_kernel": "few_rows_linear/kernel.cuh",
    "bicl::rotate_kernel": "rotary/kernel.cuh",
    "bicl::swiglu_kernel": "swiglu/kernel.cuh",
    "bicl::decode::decode_kernel": "decode_attention/kernel.cuh",
    "bicl::decode::plan_kernel": "decode_attention/plan_kernel.cuh",
    "bicl::prefill::mma::kernel": "prefill_attention/mma/kernel.cuh",
    "bicl::prefill::sm90::kernel": "prefill_attention/sm90/kernel.cuh",
    "bicl::prefill::plan_kernel": "prefill_attention/plan_kernel.cuh",
    "bicl::mla::decode_kernel": "mla_decode/kernel.cuh",
    "bicl::store_latent_kernel": "store_latent/kernel.cuh",
    "bicl::compact_tokens_kernel": "compact_tokens/kernel.cuh",
    "bicl::widen_pages_kernel": "widen_pages/kernel.cuh",
    "bicl::sparse::index_pages_kernel": "sparse_select/index.cuh",
    "bicl::sparse::store_and_index_kernel": "sparse_select/index.cuh",
    "bicl::sparse::rotate_store_and_index_kernel": "sparse_select/index.cuh",
    "bicl::sparse::tiles_kernel": "sparse_select/tiles.cuh",
}
"""Kernel (template) to the header that defines it, below the sources' root."""

# What NVRTC does not bring: it compiles device code only and knows no host headers.
PRELUDE = """
typedef signed char int8_t; typedef unsigned char uint8_t;
typedef short int16_t; typedef unsigned short uint16_t;
typedef int int32_t; typedef unsigned int uint32_t;
typedef long int64_t; typedef unsigned long uint64_t; typedef unsigned long uintptr_t;
#define INFINITY __int_as_float(0x7f800000)
namespace std {
template <class A, class B> inline constexpr bool is_same_v = false;
template <class A> inline constexpr bool is_same_v<A, A> = true;
template <bool B, class T, class F> struct conditional { using type = T; };
template <class T, class F> struct conditional<false, T, F> { using type = F; };
template <bool B, class T, class F> using conditional_t = typename conditional<B, T, F>::type;
}
"""
HOST_HEADERS = ("algorithm", "cstdint", "cuda_runtime.h", "type_traits")


def name_expression(tag: str) -> str:
    """The kernel's C++ name.

    Args:
        tag: ``bicl::KernelTag<&kernel>`` or ``bicl::KernelTag<&(void kernel<...>(...))>``, as the
            library spells the kernel it needs.

    Raises:
        BackendError: it is no such name.
    """
    # Values of enumerations among the template's arguments are spelled with parentheses too.
    plain = re.fullmatch(r"bicl::KernelTag<&([\w:]+)>", tag)
    template = re.fullmatch(r"bicl::KernelTag<&\(void ([\w:]+<.*>)\([^()]*\)\)>", tag)
    found = plain or template
    if found is None:
        raise BackendError(f"{tag} does not name a kernel of this library")
    return found[1]


class KernelCompiler:
    """Makes kernels for one kind of card.

    Args:
        sources: JSON file beside the library: name of each source file to its text.
        capability: compute capability of the card.

    Raises:
        BackendError: CuPy, its NVRTC, the CUDA headers or the sources are missing.
    """

    def __init__(self, sources: Path, capability: tuple[int, int]) -> None:
        try:
            from cupy.cuda import nvrtc
        except ImportError as error:
            raise BackendError(
                f"CuPy is not installed ({error}); pip install 'bicl[cuda]'"
            ) from error
        if not sources.exists():
            raise BackendError(
                f"no kernel sources at {sources}; run `make kernels`, which writes them there"
            )
        self.arch = f"sm_{capability[0]}{capability[1]}" + ("a" if capability == (9, 0) else "")
        self._nvrtc: Any = nvrtc
        self._sources = json.loads(sources.read_text())
        # CuPy's own folder and variable: who moved its cache moved ours.
        self._cache = Path(environment().get("CUPY_CACHE_DIR", "~/.cupy/kernel_cache")).expanduser()
        self._include = _cuda_include()
        facts = [sources.read_text(), PRELUDE, self.arch, str(nvrtc.getVersion())]
        self._digest = hashlib.sha256("\0".join(facts).encode()).hexdigest()

    def __call__(self, tag: str) -> bytes:
        """Symbol and image of a kernel: ``name \\0 cubin``.

        Raises:
            BackendError: it does not compile for this card.
        """
        key = hashlib.sha256(f"{self._digest}\0{tag}".encode()).hexdigest()
        cached = self._cache / f"bicl_{key}.cubin"
        if cached.exists():
            return cached.read_bytes()
        expression, start = name_expression(tag), time.monotonic()
        made = self._compile(expression)
        log.warning(
            "compiled %s for %s in %.1f s; kept in %s",
            expression, self.arch, time.monotonic() - start, cached,
        )  # fmt: skip
        _write_whole(cached, made)
        return made

    def _compile(self, expression: str) -> bytes:
        header = HEADERS.get(expression.partition("<")[0])
        if header is None:
            raise BackendError(f"no source is listed for kernel {expression}")
        nvrtc = self._nvrtc
        with tempfile.TemporaryDirectory() as folder:
            for name, text in self._sources.items():
                path = Path(folder) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            program = nvrtc.createProgram(
                f'{PRELUDE}#include "{header}"\n', "bicl.cu",
                [b""] * len(HOST_HEADERS), [name.encode() for name in HOST_HEADERS],
            )  # fmt: skip
            nvrtc.addNameExpression(program, expression)
            options = [
                f"--gpu-architecture={self.arch}", "-std=c++17", "-default-device", "-DNDEBUG",
                f"-I{folder}", *(f"-I{path}" for path in self._include),
            ]  # fmt: skip
            try:
                nvrtc.compileProgram(program, options)
            except nvrtc.NVRTCError as error:
                raise BackendError(
                    f"{expression} does not compile for {self.arch}: "
                    f"{nvrtc.getProgramLog(program)[-2000:]}"
                ) from error
            symbol: str = nvrtc.getLoweredName(program, expression)
            image: bytes = nvrtc.getCUBIN(program)
            return symbol.encode() + b"\0" + image


def _cuda_include() -> list[Path]:
    """Folders with ``cuda_fp16.h`` and its like: pip's packages first, then the toolkit."""
    import cupy

    roots: list[Path] = []
    if (spec := importlib.util.find_spec("nvidia")) is not None:
        for folder in spec.submodule_search_locations or []:
            roots += sorted(Path(folder).glob("cu*/include"))
    if toolkit := cupy.cuda.get_cuda_path():
        roots.append(Path(toolkit) / "include")
    roots.append(Path("/usr/local/cuda/include"))
    for root in roots:
        if (root / "cuda_fp8.h").exists():
            return [root, root / "cccl"]
    raise BackendError(
        "no CUDA headers (cuda_fp8.h) were found to compile kernels with; "
        "pip install nvidia-cuda-runtime, or set CUDA_PATH"
    )


def _write_whole(path: Path, data: bytes) -> None:
    """Processes may race to write the same file: each writes its own and renames it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_bytes(data)
        partial.replace(path)
    except OSError as error:  # a read-only root: every start compiles again
        log.warning("%s is not kept: %s", path, error)
