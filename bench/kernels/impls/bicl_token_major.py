"""Our decode kernel on token-major pages, built from ``bench/kernels/token_major.cu``.

``python -m bench.kernels.impls.bicl_token_major`` builds it; ``make bench-kernels`` does so first.
The library is named after the sources it was made from: one of older sources is never measured.
"""

from __future__ import annotations

import hashlib
import shlex
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from bench.kernels.arena import PagedBatch
from bench.kernels.impls import Contestant, Prepared, Registry
from bench.kernels.impls.bicl import PAGE, decode_calls, pages_of
from bench.kernels.shapes import HEAD_DIM
from bicl.attention.pool import LayerCache
from bicl.ops.cuda.workspace import Workspace

__all__ = ["NAME", "build", "library", "register"]

NAME = "token-major"
_ROOT = Path(__file__).resolve().parents[3]
_CSRC = _ROOT / "csrc"
_SOURCE = _ROOT / "bench" / "kernels" / "token_major.cu"
_FOLDER = _ROOT / "build" / "bench"


@cache
def library() -> Path:
    """Where the library of the sources as they are now lies, or would lie."""
    digest = hashlib.sha256()
    for path in [_SOURCE, *sorted(_CSRC.rglob("*.cu*")), *sorted(_CSRC.rglob("*.h"))]:
        digest.update(path.relative_to(_ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return _FOLDER / f"libbicl_token_major-{digest.hexdigest()[:12]}.so"


def build() -> None:
    """Compile for Hopper, the card whose layout question it answers; remove what is out of date.

    Raises:
        FileNotFoundError, CalledProcessError: nvcc is absent or refuses.
    """
    if library().exists():
        return

    def flags(what: str) -> list[str]:
        command = [sys.executable, "-m", "tvm_ffi.config", what]
        return shlex.split(
            subprocess.run(command, check=True, capture_output=True, text=True).stdout
        )

    include = [flag for flag in flags("--cxxflags") if flag.startswith("-I")]
    _FOLDER.mkdir(parents=True, exist_ok=True)
    partial_library = library().with_suffix(".partial")
    subprocess.run(
        [
            *("nvcc", "-shared", "-std=c++17", "-O3", "-DNDEBUG", "--expt-relaxed-constexpr"),
            *("-gencode", "arch=compute_90a,code=sm_90a", "-Xcompiler", "-fPIC"),
            *("-Xptxas", "-v", "-I", str(_CSRC), *include),
            *("-o", str(partial_library), str(_SOURCE), *flags("--ldflags"), "-ltvm_ffi"),
        ],
        check=True,
    )
    for stale in _FOLDER.glob("libbicl_token_major*.so"):
        stale.unlink()
    partial_library.rename(library())


def register(registry: Registry) -> None:
    if not library().exists():
        stale = any(_FOLDER.glob("libbicl_token_major*.so"))
        raise ImportError(
            f"{NAME} is {'built from other sources' if stale else 'not built'}; "
            f"run `python -m {__name__}` (needs nvcc)"
        )
    registry.decode.append(Contestant(NAME, _decode))


@cache
def _module() -> Any:
    import tvm_ffi

    return tvm_ffi.load_module(str(library()))


def _attend(
    query: torch.Tensor,
    layer: LayerCache,
    page_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    space: Workspace,
    *,
    out: torch.Tensor,
    plan: torch.Tensor | None,
    scale: float,
    pdl: bool = False,
) -> None:
    """As ``decode_attention``."""
    run = _module().bind_decode_attention(
        *(layer.pages, PAGE, 1.0, 1.0, space.partials, space.counters),
        *(scale, 0.0, -1, False, False, 0, 0),
    )
    run(out, None, query, page_table, cache_seqlens, plan, int(pdl))


def _plan(
    plan: torch.Tensor,
    layer: LayerCache,
    page_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    *,
    num_q_heads: int,
) -> None:
    """As ``plan_decode``."""
    _module().plan_decode(
        *(plan, layer.pages, PAGE, page_table, cache_seqlens, num_q_heads),
        *(-1, False, False, False, 0, 0),
    )


def _decode(batch: PagedBatch) -> Prepared:
    layer, tables = pages_of(batch, torch.bfloat16), batch.page_tables(PAGE)

    def key_value(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = tables[0][index, : batch.pages(PAGE)[index]].long()
        shape = (layer.num_pages, 2, PAGE, batch.heads.kv, HEAD_DIM)
        rows = layer.pages.view(shape)[ids].transpose(0, 1).flatten(1, 2)
        return rows[0, : batch.lengths[index]], rows[1, : batch.lengths[index]]

    calls = decode_calls({}, batch, tables=tables, attend=_attend, plan_with=_plan)
    return replace(calls, key_value=key_value)


if __name__ == "__main__":
    build()
