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
import csv
import io
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.kernels.shapes import DECODE_SHAPES, MAIN_HEADS, PREFILL_SHAPES, Heads, kv_bytes

__all__ = ["CASES", "METRICS", "SPREADS", "STALLS", "Case", "main", "parse_rows", "summarise_case"]

METRICS = {
    "time_ns": "gpu__time_duration.sum",
    "clock_hz": "gpc__cycles_elapsed.avg.per_second",
    "dram_peak_pct": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
    "l2_peak_pct": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_hit_pct": "lts__t_sector_hit_rate.pct",
    "l2_sectors": "lts__t_sectors_srcunit_tex.sum",
    "l2_requests": "lts__t_requests_srcunit_tex.sum",
    "load_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "load_requests": "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "issue_pct": "sm__inst_issued.avg.pct_of_peak_sustained_active",
    "tensor_pct": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "warps_pct": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "warps_possible_pct": "sm__maximum_warps_per_active_cycle_pct",
    "ctas": "launch__grid_size",
    "threads": "launch__block_size",
    "registers": "launch__registers_per_thread",
    "shared_bytes": "launch__shared_mem_per_block",
    "ctas_by_registers": "launch__occupancy_limit_registers",
    "ctas_by_shared": "launch__occupancy_limit_shared_mem",
    "least_cycles": "sm__cycles_active.min",
    "mean_cycles": "sm__cycles_active.avg",
    "most_cycles": "sm__cycles_active.max",
}

SPREADS = {
    "dram_channels": "dram__bytes_read",
    "dram_busy": "dram__cycles_active",
    "l2_slices": "lts__t_sectors_op_read",
    "sms": "l1tex__m_xbar2l1tex_read_bytes",
}
"""What every unit of a kind has of its own: least and most over the mean. Asked for where ncu knows
the counter."""
_ROLLUPS = ("min", "avg", "max")

STALLS = (
    "barrier",
    "branch_resolving",
    "dispatch_stall",
    "drain",
    "gmma",
    "imc_miss",
    "lg_throttle",
    "long_scoreboard",
    "math_pipe_throttle",
    "membar",
    "mio_throttle",
    "misc",
    "no_instruction",
    "not_selected",
    "selected",
    "short_scoreboard",
    "sleeping",
    "tex_throttle",
    "wait",
)
"""States of a warp; ``selected`` and ``not_selected`` are no waits. ``gmma`` is Hopper's."""

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


@dataclass(frozen=True)
class Case:
    """One call: ``op`` (decode or prefill) of ``impl`` at ``shape`` with ``heads``."""

    op: str
    impl: str
    shape: str
    heads: Heads

    def __str__(self) -> str:
        return f"{self.op} {self.impl} {self.shape} {self.heads}"

    @property
    def range_name(self) -> str:
        """Its NVTX range; the bars end it, so that no name is found within another."""
        return f"|{self}|"


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


def _stall_metric(reason: str) -> str:
    """Warps in this state, a cycle in which an instruction issues."""
    return f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio"


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


def _ratio(top: float | None, bottom: float | None, digits: int = 2) -> float | None:
    return round(top / bottom, digits) if top is not None and bottom else None


def _stalls(row: Mapping[str, str]) -> dict[str, float]:
    """Percent of its warps' time in each state, largest first; below half a percent left out."""
    found = {reason: _number(row.get(_stall_metric(reason))) or 0.0 for reason in STALLS}
    total = sum(found.values())
    shares = {reason: round(100 * part / total, 1) for reason, part in found.items() if total}
    ordered = sorted(shares.items(), key=lambda pair: -pair[1])
    return {reason: share for reason, share in ordered if share >= 0.5}


def _spread(row: Mapping[str, str], counter: str) -> list[float] | None:
    least, mean, most = (_number(row.get(f"{counter}.{rollup}")) for rollup in _ROLLUPS)
    ends = (_ratio(least, mean, 3), _ratio(most, mean, 3))
    return [end for end in ends if end is not None] or None


def summarise_case(case: Case, rows: Iterable[Mapping[str, str]]) -> dict[str, Any] | None:
    """Counters of the longest kernel of ``case``; None if ncu saw none.

    The kernel's siblings (metadata, merge) are listed with their times.
    """
    mine = [row for row in rows if any(case.range_name in (cell or "") for cell in row.values())]
    if not mine:
        return None
    times = {id(row): _number(row.get(METRICS["time_ns"])) or 0.0 for row in mine}
    main_row = max(mine, key=lambda row: times[id(row)])
    values = {name: _number(main_row.get(metric)) for name, metric in METRICS.items()}
    percents = [name for name in METRICS if name.endswith("_pct")]
    limits = ("ctas", "threads", "registers", "shared_bytes", "ctas_by_registers", "ctas_by_shared")
    return {
        "case": str(case),
        "kernel": main_row.get("Kernel Name", "")[:120],
        "us": round((values["time_ns"] or 0.0) / 1e3, 2),
        "other_kernels_us": [round(times[id(row)] / 1e3, 2) for row in mine if row is not main_row],
        "ghz": _ratio(values["clock_hz"], 1e9, 3),
        "dram_read_mb": _ratio(values["dram_read_bytes"], 1e6),
        "dram_write_mb": _ratio(values["dram_write_bytes"], 1e6),
        **{name: values[name] for name in percents},
        "sectors_per_l2_request": _ratio(values["l2_sectors"], values["l2_requests"]),
        "sectors_per_load": _ratio(values["load_sectors"], values["load_requests"]),
        **{name: int(value) for name in limits if (value := values[name]) is not None},
        "least_busy_sm": _ratio(values["least_cycles"], values["most_cycles"], 3),
        "mean_busy_sm": _ratio(values["mean_cycles"], values["most_cycles"], 3),
        "spread": {name: ends for name, c in SPREADS.items() if (ends := _spread(main_row, c))},
        "stalls_pct": _stalls(main_row),
    }


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
    spreads = [f"{c}.{r}" for c in SPREADS.values() if c in known for r in _ROLLUPS]
    metrics = [*METRICS.values(), *map(_stall_metric, STALLS), *spreads]
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


def _line(row: Mapping[str, Any]) -> str:
    waits = [pair for pair in row["stalls_pct"].items() if "selected" not in pair[0]][:3]
    return (
        f"{row['case']:40} {row['us']:8.1f} us  DRAM {row['dram_peak_pct']} %  "
        f"L2 hit {row['l2_hit_pct']} %  tensor {row['tensor_pct']} %  "
        f"SMs busy {row['mean_busy_sm']}  " + ", ".join(f"{name} {pct} %" for name, pct in waits)
    )


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
        | {"metrics": METRICS | SPREADS, "stall_metric": _stall_metric("*")}
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
                print(_line(result))
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
