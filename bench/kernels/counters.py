"""Hardware counters of decode attention: tiles against token-major pages, by Nsight Compute.

``python -m bench.kernels.counters --out bench/results/counters-h200.json`` profiles one cold call
of each case (caches flushed, clocks left alone) and writes, for its longest kernel: time, DRAM
bytes and share of peak, L2 hit rate, and sectors a request between L1 and L2.

A decode step reads every byte of K and V once. A low L2 hit rate is therefore no fault and a high
one no merit; the share of the DRAM peak is what counts. Both are shown because both were claimed.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.kernels.shapes import DECODE_SHAPES, Heads

__all__ = ["CASES", "METRICS", "main", "parse_rows", "summarise_case"]

METRICS = {
    "time_ns": "gpu__time_duration.sum",
    "dram_peak_pct": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_read_bytes": "dram__bytes_read.sum",
    "l2_hit_pct": "lts__t_sector_hit_rate.pct",
    "l2_sectors": "lts__t_sectors_srcunit_tex.sum",
    "l2_requests": "lts__t_requests_srcunit_tex.sum",
    "load_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "load_requests": "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "issue_pct": "sm__inst_issued.avg.pct_of_peak_sustained_active",
    "tensor_pct": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "warps_pct": "sm__warps_active.avg.pct_of_peak_sustained_active",
}

_HEADS = (Heads(32, 8), Heads(32, 32))
_SHAPES = ("1x4096", "32x4096")
_IMPLS = (
    "bicl",
    "token-major",
    "flashinfer-p1",
    "flashinfer-p1-tc",
    "fa3-p64",
    "sdpa-cudnn",
)


def _cases(heads: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{impl} {shape} {h}" for h in heads for shape in _SHAPES for impl in _IMPLS)


CASES = _cases([str(heads) for heads in _HEADS])


def parse_rows(text: str) -> list[dict[str, str]]:
    """Rows of ncu's raw CSV page; its second line (units) and its own messages are dropped."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(io.StringIO("\n".join(lines))))
    return [row for row in rows if row.get("ID", "").strip().isdigit()]


def _number(text: str | None) -> float | None:
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return None


def _ratio(top: float | None, bottom: float | None) -> float | None:
    return round(top / bottom, 2) if top is not None and bottom else None


def summarise_case(case: str, rows: Iterable[Mapping[str, str]]) -> dict[str, Any] | None:
    """Counters of the longest kernel of ``case``; None if ncu saw none.

    The kernel's siblings (metadata, merge) are listed with their times.
    """
    mine = [row for row in rows if any(f"{case}|" in (cell or "") for cell in row.values())]
    if not mine:
        return None
    times = {id(row): _number(row.get(METRICS["time_ns"])) or 0.0 for row in mine}
    main_row = max(mine, key=lambda row: times[id(row)])
    values = {name: _number(main_row.get(metric)) for name, metric in METRICS.items()}
    return {
        "case": case,
        "kernel": main_row.get("Kernel Name", "")[:120],
        "us": round((values["time_ns"] or 0.0) / 1e3, 2),
        "other_kernels_us": [round(times[id(row)] / 1e3, 2) for row in mine if row is not main_row],
        "dram_peak_pct": values["dram_peak_pct"],
        "dram_read_mb": _ratio(values["dram_read_bytes"], 1e6),
        "l2_hit_pct": values["l2_hit_pct"],
        "sectors_per_l2_request": _ratio(values["l2_sectors"], values["l2_requests"]),
        "sectors_per_load": _ratio(values["load_sectors"], values["load_requests"]),
        "issue_pct": values["issue_pct"],
        "tensor_pct": values["tensor_pct"],
        "warps_pct": values["warps_pct"],
    }


def _profile(log: Path, heads: Sequence[str]) -> list[dict[str, str]]:
    """Run this module's ``--child`` under ncu and return its rows."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise FileNotFoundError("ncu (Nsight Compute) is not on PATH; it comes with the toolkit")
    command = [
        ncu,
        *("--clock-control", "none", "--cache-control", "all", "--profile-from-start", "off"),
        *("--nvtx", "--print-units", "base", "--csv", "--page", "raw"),
        *("--metrics", ",".join(METRICS.values())),
        *("--log-file", str(log)),
        *(sys.executable, "-m", "bench.kernels.counters", "--child", "--heads", *heads),
    ]
    subprocess.run(command, check=True)
    return parse_rows(log.read_text())


def _child(wanted: Sequence[str]) -> None:
    """Call every case once between cudaProfilerStart and Stop, in an NVTX range of its name."""
    import torch

    from bench.kernels.arena import Arena, PagedBatch
    from bench.kernels.impls import load

    contestants = {contestant.name: contestant for contestant in load().decode}
    arena = Arena(6 << 30)
    runtime = torch.cuda.cudart()
    for heads in (each for each in _HEADS if str(each) in wanted):
        for shape in _SHAPES:
            lengths = DECODE_SHAPES[shape]
            batch = PagedBatch(arena, heads, lengths, (1,) * len(lengths), rotations=1)
            for name in _IMPLS:
                if name not in contestants:
                    continue
                try:
                    prepared = contestants[name].prepare(batch)
                    prepared.calls[0]()
                    torch.cuda.synchronize()
                except Exception as error:
                    print(f"{name} {shape} {heads}: {error}", file=sys.stderr)
                    continue
                torch.cuda.nvtx.range_push(f"{name} {shape} {heads}|")
                runtime.cudaProfilerStart()
                prepared.calls[0]()
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
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        _child(options.heads)
        return 0
    from bench.kernels import machine

    rows = _profile(options.out.with_suffix(".csv"), options.heads)
    found = {case: summarise_case(case, rows) for case in _cases(options.heads)}
    document = {
        "meta": machine.describe({}, options.commit)
        | {"metrics": METRICS, "caches": "flushed before each kernel"},
        "missing": [case for case, result in found.items() if result is None],
        "rows": [result for result in found.values() if result is not None],
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    for row in document["rows"]:
        print(
            f"{row['case']:32} {row['us']:8.1f} us  DRAM {row['dram_peak_pct']:5.1f} %  "
            f"L2 hit {row['l2_hit_pct']:5.1f} %  sectors a request {row['sectors_per_l2_request']}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
