"""What Nsight Compute says of a kernel, as rows of a result file and of a table."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bench.kernels.shapes import MAIN_HEADS, Heads

__all__ = [
    "METRICS",
    "ROLLUPS",
    "SPREADS",
    "STALLS",
    "Case",
    "parse_rows",
    "stall_metric",
    "summarise_case",
    "table",
]

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
_HEADINGS = (
    *("call", "us", "GHz", "MB read", "DRAM", "L2 hit", "tensor", "issued", "warps"),
    *("registers", "SMs busy", "waits for"),
)
_SHOWN = ("dram_peak", "l2_hit", "tensor", "issue", "warps")
ROLLUPS = ("min", "avg", "max")

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


def stall_metric(reason: str) -> str:
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
    found = {reason: _number(row.get(stall_metric(reason))) or 0.0 for reason in STALLS}
    total = sum(found.values())
    shares = {reason: round(100 * part / total, 1) for reason, part in found.items() if total}
    ordered = sorted(shares.items(), key=lambda pair: -pair[1])
    return {reason: share for reason, share in ordered if share >= 0.5}


def _spread(row: Mapping[str, str], counter: str) -> list[float] | None:
    least, mean, most = (_number(row.get(f"{counter}.{rollup}")) for rollup in ROLLUPS)
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


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows of the result file in Markdown, as the docs show them: what a warp waits for leaves out
    that it is issuing or could."""
    lines = [f"| {' | '.join(_HEADINGS)} |", "|---" * len(_HEADINGS) + "|"]
    for row in rows:
        percents = [row[f"{name}_pct"] for name in _SHOWN]
        waits = [pair for pair in row["stalls_pct"].items() if "selected" not in pair[0]]
        cells = [
            *(row["case"].removesuffix(f" {MAIN_HEADS}"), f"{row['us']:.1f}", f"{row['ghz']:.2f}"),
            f"{row['dram_read_mb']:.0f}",
            *("-" if percent is None else f"{percent:.0f} %" for percent in percents),
            *(str(row.get("registers", "-")), f"{row['mean_busy_sm']:.3f}"),
            ", ".join(f"{name.replace('_', ' ')} {share:.0f} %" for name, share in waits[:3]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
