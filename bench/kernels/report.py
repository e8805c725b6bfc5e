"""The result of a run: rows, what they were measured on, one JSON file and one table.

``{"meta": {...}, "rows": [{"op", "heads", "shape", "impl", "us", "gbps" | "tflops"}, ...]}``;
rows carry ``us_p20`` and ``us_p80`` beside the median ``us``. ``meta.missing`` names the
contestants that could not run at all and ``meta.skipped`` single cells, each with the reason.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bench.timing import Sample

__all__ = ["OPS", "Report", "find", "load_report", "markdown_table", "validate"]

OPS = ("decode", "layer", "prefill", "store", "plan", "launch", "mla")
_RATES = ("gbps", "tflops")


class Report:
    """Collects rows and rewrites the file after each section, so that a late crash loses little."""

    def __init__(self, path: Path, meta: dict[str, Any]) -> None:
        self.path = path
        self.meta = {**meta, "missing": {}, "skipped": {}, "checks": {}}
        self.rows: list[dict[str, Any]] = []

    def add(
        self,
        op: str,
        heads: str,
        shape: str,
        impl: str,
        sample: Sample,
        *,
        num_bytes: int | None = None,
        flops: int | None = None,
    ) -> None:
        """Add a row; ``num_bytes`` or ``flops`` of one call give its rate."""
        row: dict[str, Any] = {
            "op": op,
            "heads": heads,
            "shape": shape,
            "impl": impl,
            "us": round(sample.median, 3),
            "us_p20": round(sample.p20, 3),
            "us_p80": round(sample.p80, 3),
        }
        if num_bytes is not None:
            row["gbps"] = round(num_bytes / sample.median / 1e3, 1)
        if flops is not None:
            row["tflops"] = round(flops / sample.median / 1e6, 1)
        self.rows.append(row)

    def skip(self, cell: str, reason: str) -> None:
        """Note why a cell stays empty; the first line of the reason is enough."""
        self.meta["skipped"][cell] = reason.splitlines()[0][:300]

    def line(self, op: str, heads: str, shape: str) -> str:
        """All contestants of one shape in a line, for the console."""
        return "  ".join(
            f"{row['impl']} {row['us']:.1f}"
            for row in self.rows
            if (row["op"], row["heads"], row["shape"]) == (op, heads, shape)
        )

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        document = {"meta": self.meta, "rows": self.rows}
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(document, indent=1) + "\n")
        os.replace(partial, self.path)


def validate(document: Mapping[str, Any]) -> list[str]:
    """What is wrong with a result file; empty if nothing."""
    problems = []
    if not isinstance(document.get("meta"), dict):
        problems.append("meta is missing")
    rows = document.get("rows")
    if not isinstance(rows, list):
        return [*problems, "rows is missing"]
    seen = set()
    for index, row in enumerate(rows):
        absent = [key for key in ("op", "heads", "shape", "impl", "us") if key not in row]
        if absent:
            problems.append(f"row {index} lacks {', '.join(absent)}")
            continue
        if row["op"] not in OPS:
            problems.append(f"row {index}: op {row['op']!r} is none of {', '.join(OPS)}")
        if not row["us"] > 0:
            problems.append(f"row {index}: us is {row['us']}")
        if row["op"] in ("decode", "prefill", "store") and not any(r in row for r in _RATES):
            problems.append(f"row {index} has neither gbps nor tflops")
        key = (row["op"], row["heads"], row["shape"], row["impl"])
        if key in seen:
            problems.append(f"row {index} repeats {' '.join(key)}")
        seen.add(key)
    return problems


def load_report(path: Path) -> dict[str, Any]:
    """Read a result file.

    Raises:
        ValueError: it is no valid result file; the message lists what is wrong.
    """
    document = json.loads(path.read_text())
    problems = validate(document)
    if problems:
        raise ValueError(f"{path}: " + "; ".join(problems))
    return document


def find(
    rows: Iterable[Mapping[str, Any]], op: str, heads: str, shape: str, impl: str
) -> float | None:
    """Median microseconds of one cell, or None where it was not measured."""
    for row in rows:
        if (row["op"], row["heads"], row["shape"], row["impl"]) == (
            op,
            heads,
            shape,
            impl,
        ):
            return float(row["us"])
    return None


def markdown_table(rows: list[Mapping[str, Any]], op: str, heads: str) -> str:
    """One Markdown table: a line a shape, a column an implementation, microseconds."""
    chosen = [row for row in rows if row["op"] == op and row["heads"] == heads]
    shapes = list(dict.fromkeys(row["shape"] for row in chosen))
    impls = list(dict.fromkeys(row["impl"] for row in chosen))
    lines = [
        "| shape | " + " | ".join(impls) + " |",
        "|---|" + "---:|" * len(impls),
    ]
    for shape in shapes:
        cells = [find(chosen, op, heads, shape, impl) for impl in impls]
        text = ["-" if us is None else f"{us:.1f}" for us in cells]
        lines.append(f"| {shape} | " + " | ".join(text) + " |")
    return "\n".join(lines)
