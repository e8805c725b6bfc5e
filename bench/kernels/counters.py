"""Hardware counters of attention kernels, by Nsight Compute: bytes, stalls, occupancy.

``python -m bench.kernels.counters --out bench/results/counters-h200.json`` profiles one cold call
of each case (caches flushed, clocks left alone) and writes, for its longest kernel: time and clock,
DRAM bytes and share of peak, L2 hit rate, sectors a request between L1 and L2, what the kernel's
warps wait for, what bounds its occupancy, and how evenly its SMs are busy. Cases are decode over
tiles beside token-major pages and peers, and every shape at which a target is missed or nearly so,
beside the peer that it is measured against.

A decode step reads every byte of K and V once. A low L2 hit rate is therefore no fault and a high
one no merit; the share of the DRAM peak is what counts. Both are shown because both were claimed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.kernels.counter_rows import (
    METRICS,
    ROLLUPS,
    SPREADS,
    STALLS,
    Case,
    parse_rows,
    stall_metric,
    summarise_case,
    table,
)
from bench.kernels.shapes import DECODE_SHAPES, MAIN_HEADS, PREFILL_SHAPES, Heads, kv_bytes

__all__ = ["CASES", "main"]

_HEADS = (MAIN_HEADS, Heads(32, 32))
_LAYOUT_IMPLS = (
    "bicl",
    "token-major",
    "flashinfer-p1",
    "flashinfer-p1-tc",
    "fa3-p64",
    "sdpa-cudnn",
)
_FLOORS = {"floor-bulk": "bulk 32K x6 x1", "floor-loads": "loads x4"}
"""Two of the plain kernels that read the same bytes, by their names in ``impls.floor``."""
_DECODE = {
    "32x16384": (
        *("bicl", "bicl-deterministic", "fa3-p128-sched", "flashinfer-batch", "sdpa-cudnn"),
        *_FLOORS,
    ),
    "mix64": ("bicl", "fa3-p128-sched"),
    "skew": ("bicl", "flashinfer-p1", "fa3-p128-sched"),
    "8x4096": ("bicl", "flashinfer-p1", "fa3-p128-sched", *_FLOORS),
    "256x512": ("bicl", "flashinfer-p1", "flashinfer-batch"),
    "32x4096": _LAYOUT_IMPLS,
    "1x4096": _LAYOUT_IMPLS,
}
_PREFILL = dict.fromkeys(PREFILL_SHAPES, ("bicl", "fa3-p128"))


def _cases() -> list[Case]:
    main = [Case("decode", name, shape, MAIN_HEADS) for shape in _DECODE for name in _DECODE[shape]]
    main += [
        Case("prefill", name, shape, MAIN_HEADS) for shape in _PREFILL for name in _PREFILL[shape]
    ]
    others = [heads for heads in _HEADS if heads != MAIN_HEADS]
    layout = [shape for shape, names in _DECODE.items() if names is _LAYOUT_IMPLS]
    return main + [
        Case("decode", name, shape, heads)
        for heads in others
        for shape in layout
        for name in _LAYOUT_IMPLS
    ]


CASES = tuple(_cases())


def _known(ncu: str) -> set[str]:
    """Counters that this ncu has for this card, without their endings."""
    listing = subprocess.run([ncu, "--query-metrics"], capture_output=True, text=True).stdout
    return {line.split()[0] for line in listing.splitlines() if line.strip()}


def _profile(
    log: Path, cases: Sequence[Case], *, warm: bool, seconds: float
) -> list[dict[str, str]]:
    """Run this module's ``--child`` under ncu and return its rows."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise FileNotFoundError("ncu (Nsight Compute) is not on PATH; it comes with the toolkit")
    known = _known(ncu)
    spreads = [f"{c}.{r}" for c in SPREADS.values() if c in known for r in ROLLUPS]
    metrics = [*METRICS.values(), *map(stall_metric, STALLS), *spreads]
    command = [
        ncu,
        *("--clock-control", "none", "--cache-control", "none" if warm else "all"),
        *("--profile-from-start", "off", "--nvtx"),
        *("--print-units", "base", "--csv", "--page", "raw"),
        *("--metrics", ",".join(metrics)),
        *("--log-file", str(log)),
        *(sys.executable, "-m", "bench.kernels.counters", "--seconds", str(seconds)),
        *("--child", *map(str, cases)),
    ]
    subprocess.run(command, check=True)
    return parse_rows(log.read_text())


def _prepared(case: Case, arena: Any, registry: Any) -> Sequence[Callable[[], object]]:
    """Calls of a case; LookupError where its contestant is not installed."""
    from bench.kernels.arena import PagedBatch
    from bench.kernels.impls import floor

    if case.op == "prefill":
        batch = PagedBatch.prefill(arena, case.heads, PREFILL_SHAPES[case.shape])
    else:
        lengths = DECODE_SHAPES[case.shape]
        batch = PagedBatch(arena, case.heads, lengths, (1,) * len(lengths), rotations=1)
        if case.impl in _FLOORS:
            return floor.reads(arena, kv_bytes(lengths, case.heads.kv))[_FLOORS[case.impl]]
    group = registry.prefill if case.op == "prefill" else registry.decode
    contestants = {contestant.name: contestant for contestant in group}
    return contestants[case.impl].prepare(batch).calls


def _child(cases: Sequence[Case], seconds: float) -> None:
    """Call every case once between cudaProfilerStart and Stop, in an NVTX range of its name; none
    is begun after ``seconds``."""
    import torch

    from bench.kernels.arena import Arena
    from bench.kernels.impls import load

    end = time.monotonic() + seconds
    registry = load()
    arena = Arena(6 << 30)
    runtime = torch.cuda.cudart()
    for case in cases:
        if time.monotonic() > end:
            print(f"{case}: no time left", file=sys.stderr)
            continue
        try:
            calls = _prepared(case, arena, registry)
            calls[0]()
            torch.cuda.synchronize()
        except Exception as error:
            print(f"{case}: {error!r}", file=sys.stderr)
            continue
        torch.cuda.nvtx.range_push(case.range_name)
        runtime.cudaProfilerStart()
        calls[0]()
        torch.cuda.synchronize()
        runtime.cudaProfilerStop()
        torch.cuda.nvtx.range_pop()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("bench/results/counters-h200.json"))
    parser.add_argument("--commit", help="of the sources, where there is no repository to ask")
    parser.add_argument(
        "--heads", nargs="+", default=[str(heads) for heads in _HEADS], help="default: all"
    )
    parser.add_argument("--ops", nargs="+", default=["decode", "prefill"], help="default: both")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument(
        "--warm", action="store_true", help="leave the caches as the call before left them"
    )
    parser.add_argument(
        "--seconds", type=float, default=600, help="begin no case of an operator later than this"
    )
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        _child([case for case in CASES if str(case) in options.child], options.seconds)
        return 0
    wanted = [case for case in CASES if str(case.heads) in options.heads]
    wanted = [case for case in wanted if options.only in str(case)]
    from bench.kernels import machine
    from bench.kernels.impls import load

    document: dict[str, Any] = {
        "meta": machine.describe(load().versions, options.commit)
        | {"metrics": METRICS | SPREADS, "stall_metric": stall_metric("*")}
        | {
            "caches": "as the call before left them"
            if options.warm
            else "flushed before each kernel"
        },
        "missing": [],
        "rows": [],
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for op in options.ops:
        cases = [case for case in wanted if case.op == op]
        if not cases:
            continue
        log = options.out.with_suffix(f".{op}.csv")
        rows = _profile(log, cases, warm=options.warm, seconds=options.seconds)
        for case in cases:
            result = summarise_case(case, rows)
            if result is None:
                document["missing"].append(str(case))
            else:
                document["rows"].append(result)
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    print(table(document["rows"]), *document["missing"], sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
