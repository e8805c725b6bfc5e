"""What was promised of reuse, checked against the result files.

``python -m bench.reuse`` prints a line a target; exits 1 if one is missed or was not measured.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.targets import Verdict

__all__ = ["load", "main", "verdicts"]

RESULTS = Path("bench/results")
GPU, RATES, LOOKUP = "reuse-h200.json", "trace-hit-rates.json", "cache_lookup.json"
REPLAYS = ("trace-replay-cpu.json", "trace-replay-h200.json")
STEP = " % of step time"
LONG_HIT = 50_000
Rows = Sequence[Mapping[str, Any]]


def verdicts(results: Mapping[str, Rows]) -> list[Verdict]:
    """Every target; ``results``: file name to rows."""
    gpu = results.get(GPU, [])
    return [
        *_each(gpu, "exposed reordering, all", 1.3, STEP, at_most=True, scale=100),
        *_each(gpu, "exposed reordering, decode", 0.5, STEP, at_most=True, scale=100),
        *_each(gpu, "exposed reordering in a decode step", 0.5, STEP, at_most=True, scale=100),
        *_each(gpu, "prefill with reordering", 0.98, "x"),
        *_each(gpu, "no hits, index", 0.99, "x"),
        *_each(gpu, "no hits, index and host tier", 0.99, "x"),
        *_each(gpu, "host hit, first token", 5.0, "x"),
        *_each(gpu, "host hit, bandwidth", 0.8, " of the host-to-device rate"),
        *_each(gpu, "three turns", 1.0, "x of turns 1 and 2"),
        *_each(gpu, "in flight", 1.0, " times computed", at_most=True),
        *_hit_rates(results.get(RATES, [])),
        *(verdict for name in REPLAYS for verdict in _replay(results.get(name, []), name)),
        *_lookup(results.get(LOOKUP, [])),
    ]


def _each(
    rows: Rows, case: str, limit: float, unit: str, *, at_most: bool = False, scale: float = 1
) -> Iterator[Verdict]:
    """A verdict for each row of a case; one without a value if there is none."""
    found = [row for row in rows if row.get("case") == case]
    for row in found or [{}]:
        note = str(row.get("shape") or _shrunk(row))
        value = scale * row["value"] if "value" in row else None
        yield Verdict(case, value, limit, at_most, unit, note)


def _shrunk(row: Mapping[str, Any]) -> str:
    factor = row.get("lengths_divided_by")
    return f"lengths divided by {factor}" if factor else ""


def _hit_rates(rows: Rows) -> Iterator[Verdict]:
    cases = ("hit rate, GPU only", "hit rate, GPU + host", "hit rate, GPU + host + disk")
    for case in cases:
        found = [row for row in rows if row["case"] == case]
        for row in found or [{}]:
            note = f"{row['trace']}, {row['tokens'] / 1e6:g}M tokens" if row else ""
            points = row.get("points_from_ideal")
            yield Verdict(f"{case}: points from the ideal", points, 1.0, True, "", note)


def _replay(rows: Rows, name: str) -> Iterator[Verdict]:
    replays = [row for row in rows if row["case"].startswith("trace replay")]
    found = [row for row in replays if row["case"] != "trace replay, reuse off"]
    for row in found or [{"case": "trace replay"}]:
        note = f"{name}, {row['trace']}" if row.get("trace") else name
        yield Verdict(f"{row['case']}: throughput", row.get("value"), 1.0, False, "x", note)
        points = 100 * (row["ideal"] - row["hit_rate"]) if "ideal" in row else None
        yield Verdict(f"{row['case']}: points from the ideal", points, 1.0, True, "", note)


def _lookup(rows: Rows) -> Iterator[Verdict]:
    row = next((row for row in rows if row["tokens"] == LONG_HIT), None)

    def find(name: str) -> float | None:
        return row[name]["median"] if row and name in row else None

    for name in ("acquire_us", "acquire_branched_us", "acquire_with_tiers_us"):
        yield Verdict(f"50k-token hit, {name[:-3]}", find(name), 125.0, True, " us")
    for name in ("lookup_us", "lookup_branched_us"):
        value = find(name)
        per_thousand = None if value is None else value / (LONG_HIT / 1000)
        yield Verdict(f"{name[:-3]}, per 1k tokens", per_thousand, 10.0, True, " us")


def load(root: Path = Path()) -> dict[str, Rows]:
    """The result files below a checkout; no rows where there is no file."""
    paths = {name: root / RESULTS / name for name in (GPU, RATES, *REPLAYS, LOOKUP)}
    return {
        name: json.loads(path.read_text())["rows"] if path.exists() else []
        for name, path in paths.items()
    }


def main() -> int:
    found = verdicts(load())
    print("\n".join(map(str, found)))
    missed = sum(not verdict.passed for verdict in found)
    print(f"\n{len(found) - missed} of {len(found)} targets met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
