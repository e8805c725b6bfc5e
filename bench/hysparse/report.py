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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.record import save
from bicl.sparse.config import HySparseConfig

__all__ = [
    "DENSE_ENOUGH",
    "main",
    "merge",
    "print_table",
    "print_verdicts",
    "summarise",
    "verdicts",
]

MOST_PERPLEXITY, LEAST_ANSWERS = 0.005, 0.995

DENSE_ENOUGH = 0.5
"""Tasks that the dense model solves less often than this say nothing about a cache."""


def merge(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of several runs, or processes: one for each configuration of each measurement."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[tuple(row.get(key) for key in _KEYS)].append(row)
    return [_merged(own) for own in groups.values()]


_KEYS = ("measure", "kind", "task", "aware", "tokens", "name", "ratio")


def _merged(own: Sequence[dict[str, Any]]) -> dict[str, Any]:
    row = dict(own[0])
    if row["measure"] == "perplexity":
        texts = sum(each["texts"] for each in own)
        logs = sum(each["texts"] * math.log(each["perplexity"]) for each in own)
        differences = [d for each in own for d in each["differences"]]
        return row | {
            "texts": texts,
            "perplexity": math.exp(logs / texts),
            "differences": differences,
        }
    asked = sum(each["questions"] for each in own)
    dense = sum(each["dense_right"] for each in own)
    return row | {
        "kept": sum(each["kept"] * each["questions"] for each in own) / asked,
        "questions": asked,
        "right": sum(each["right"] for each in own),
        "dense_right": dense,
        "told_apart": dense >= DENSE_ENOUGH * asked,
    }


def summarise(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each configuration, and for each configuration and length (``tokens``).

    Counted is what left something out, of telling tasks only; the row over all lengths leaves out
    those at which a server with the default floor is dense.
    """
    groups: dict[tuple[str, float, int | None], dict[str, list[Any]]]
    groups = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if not (row["exercised"] or row["name"] == "dense"):
            continue
        for tokens in (None, row["tokens"]):
            if tokens is None and row["below_floor"]:
                continue
            own = groups[row["name"], row["ratio"], tokens]
            own["kept"].append(row["kept"])
            if row["measure"] == "perplexity":
                own["differences"] += row["differences"]
            elif row["told_apart"]:
                own["right"].append(row["right"])
                own["dense"].append(row["dense_right"])
                own["questions"].append(row["questions"])
    summary = []
    for (name, ratio, tokens), own in groups.items():
        differences = own["differences"]
        row = {"measure": "summary", "name": name, "ratio": ratio, "tokens": tokens}
        row["kept"] = _mean(own["kept"])
        if differences:
            spread = statistics.stdev(differences) if len(differences) > 1 else math.nan
            row |= {
                "pieces": len(differences),
                "perplexity_change": math.expm1(_mean(differences)),
                "perplexity_change_se": spread / math.sqrt(len(differences)),
            }
        if own["right"] and sum(own["dense"]):
            row |= {
                "task_accuracy_of_dense": sum(own["right"]) / sum(own["dense"]),
                "right": sum(own["right"]),
                "dense_right": sum(own["dense"]),
                "questions": sum(own["questions"]),
            }
        summary.append(row)
    return sorted(
        summary, key=lambda r: (r["tokens"] or 0, r["ratio"], r.get("perplexity_change", 0.0))
    )


def print_table(summary: Sequence[dict[str, Any]], ratios: Sequence[float]) -> None:
    for tokens in sorted({row["tokens"] for row in summary}, key=lambda n: n or 0):
        for ratio in ratios:
            print(f"\n{tokens or 'all'} tokens, ratio {ratio}: perplexity change (standard error), "
                  "answers, of dense")  # fmt: skip
            for row in summary:
                if (row["ratio"], row["tokens"]) == (ratio, tokens):
                    print(_line(row))


def _line(row: dict[str, Any]) -> str:
    change = 100 * row.get("perplexity_change", math.nan)
    error = 100 * row.get("perplexity_change_se", math.nan)
    share = 100 * row.get("task_accuracy_of_dense", math.nan)
    counts = f"{row.get('right', '-')}/{row.get('dense_right', '-')}"
    return f"  {row['name']:32s} {change:+8.3f} % ({error:.3f})  {counts:>9s} {share:6.1f} %"


@dataclass(frozen=True)
class Verdict:
    """One configuration against the targets at one length (``None``: all)."""

    name: str
    tokens: int | None
    perplexity: bool | None
    answers: bool | None
    ahead: bool | None
    """Of every press, in both. ``None``: not measured."""


def verdicts(summary: Sequence[dict[str, Any]], ratio: float = 0.65) -> list[Verdict]:
    """Of what a server can run: perplexity within half a per cent, 99.5 % of dense's answers, and
    no press better at as many kept keys."""
    found = []
    for row in summary:
        if row["ratio"] != ratio or row["name"].split(" ")[0] != HySparseConfig.variant:
            continue
        change, share = row.get("perplexity_change"), row.get("task_accuracy_of_dense")
        presses = [
            other
            for other in summary
            if other["name"].startswith("kvpress ")
            and (other["ratio"], other["tokens"]) == (ratio, row["tokens"])
        ]
        ahead = None
        if presses and change is not None and share is not None:
            ahead = all(
                press.get("perplexity_change", math.inf) > change
                and press.get("task_accuracy_of_dense", 0.0) < share
                for press in presses
            )
        within = None if change is None else change <= MOST_PERPLEXITY
        right = None if share is None else share >= LEAST_ANSWERS
        found.append(Verdict(row["name"], row["tokens"], within, right, ahead))
    return found


_MARKS = {True: "met", False: "missed", None: "not measured"}


def print_verdicts(found: Sequence[Verdict]) -> None:
    print("\ntargets at 0.65: perplexity, answers, ahead of every press")
    for each in found:
        marks = (_MARKS[met] for met in (each.perplexity, each.answers, each.ahead))
        print(f"  {each.name:32s} {each.tokens or 'all':>6} tokens  " + "  ".join(marks))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(argv)
    reports = [json.loads(path.read_text()) for path in options.files]
    rows = merge([row for own in reports for row in own["rows"] if row["measure"] != "summary"])
    summary = summarise(rows)
    print_table(summary, sorted({row["ratio"] for row in summary if row["ratio"]}))
    print_verdicts(verdicts(summary))
    if options.output:
        meta = reports[0]["meta"] | {"runs": [own["meta"] for own in reports]}
        save(options.output, meta, [*summary, *rows])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    main()
