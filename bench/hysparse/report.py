"""Sums over a quality run, and over several of them.

``python -m bench.hysparse.report FILE... [--output FILE]`` prints the table of one or more result
files of ``bench.hysparse.quality``; with ``--output`` it writes them as one, with new sums.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.record import save

__all__ = ["main", "print_table", "summarise"]


def summarise(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a configuration: what is above the floor and exercised, of telling tasks only."""
    groups: dict[tuple[str, float], dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["below_floor"] or not (row["exercised"] or row["name"] == "dense"):
            continue
        own = groups[row["name"], row["ratio"]]
        if row["measure"] == "perplexity":
            own["differences"] += row["differences"]
            own["kept"].append(row["kept"])
        elif row["told_apart"]:
            own["right"].append(row["right"])
            own["dense"].append(row["dense_right"])
            own["questions"].append(row["questions"])
    summary = []
    for (name, ratio), own in groups.items():
        differences = own["differences"]
        row = {"measure": "summary", "name": name, "ratio": ratio}
        if differences:
            spread = statistics.stdev(differences) if len(differences) > 1 else math.nan
            error = spread / math.sqrt(len(differences))
            row |= {
                "kept": _mean(own["kept"]),
                "perplexity_change": math.expm1(_mean(differences)),
                "perplexity_change_se": error,
            }
        if own["right"] and sum(own["dense"]):
            row |= {
                "task_accuracy_of_dense": sum(own["right"]) / sum(own["dense"]),
                "dense_right": sum(own["dense"]),
                "questions": sum(own["questions"]),
            }
        summary.append(row)
    return sorted(summary, key=lambda r: (r["ratio"], r.get("perplexity_change", 0.0)))


def print_table(summary: Sequence[dict[str, Any]], ratios: Sequence[float]) -> None:
    for ratio in ratios:
        print(f"\nratio {ratio}: perplexity change (standard error), task accuracy of dense")
        for row in summary:
            if row["ratio"] == ratio:
                change = 100 * row.get("perplexity_change", math.nan)
                error = 100 * row.get("perplexity_change_se", math.nan)
                score = 100 * row.get("task_accuracy_of_dense", math.nan)
                print(f"  {row['name']:32s} {change:+8.3f} % ({error:.3f})  {score:6.1f} %")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(argv)
    reports = [json.loads(path.read_text()) for path in options.files]
    rows = [row for own in reports for row in own["rows"] if row["measure"] != "summary"]
    summary = summarise(rows)
    print_table(summary, sorted({row["ratio"] for row in summary if row["ratio"]}))
    if options.output:
        meta = reports[0]["meta"] | {"runs": [own["meta"] for own in reports]}
        save(options.output, meta, [*summary, *rows])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    main()
