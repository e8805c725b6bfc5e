"""Sums over a quality run, and over several of them.

``python -m bench.hysparse.report ITEMS.jsonl... [--output FILE.json]`` prints the table of what
runs of ``bench.hysparse.quality`` have written so far, finished or not; with ``--output`` it writes
them as one result file. Runs of different code, texts or configurations are not summed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.record import save
from bicl.sparse.config import HySparseConfig

__all__ = [
    "DENSE_ENOUGH",
    "RATIO",
    "Cell",
    "cells",
    "leads",
    "main",
    "print_table",
    "print_verdicts",
    "read_items",
    "read_metas",
    "summarise",
    "verdicts",
    "write_report",
]

RATIO, MOST_PERPLEXITY, LEAST_ANSWERS = 0.65, 0.005, 0.995
"""The targets, and what they are for."""

DENSE_ENOUGH = 0.5
"""Tasks that the dense model solves less often than this say nothing about a cache."""

_SAME = ("study", "texts", "gates", "model", "configurations")
"""Of a run's facts: what sums must have in common."""


def read_items(files: Iterable[Path]) -> list[dict[str, Any]]:
    """Each item once, however many runs have measured it."""
    items: dict[str, dict[str, Any]] = {}
    for line in _lines(files):
        if "item" in line:
            items.setdefault(line["item"], line)
    return list(items.values())


def read_metas(files: Iterable[Path]) -> list[dict[str, Any]]:
    """What is known of each run.

    Raises:
        ValueError: they are not of one kind.
    """
    metas = [line["meta"] for line in _lines(files) if "meta" in line]
    for fact in _SAME:
        known = [meta[fact] for meta in metas if fact in meta]
        if any(each != known[0] for each in known):
            raise ValueError(f"runs with different {fact} cannot be summed: give them apart")
    return metas


def _lines(files: Iterable[Path]) -> Iterable[dict[str, Any]]:
    for path in files:
        if not path.exists():
            continue
        for line in path.read_text().splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue  # the last line of a run that was cut off


@dataclass
class Cell:
    """One configuration in one measurement: one text kind or task at one length.

    Attributes:
        labels: ``measure``, ``kind`` or ``task`` and ``aware``, ``tokens``, ``name``, ``ratio``.
        kept: shares of the keys read, one a context.
        losses: its own and dense's, one a piece.
        right: answers, its own and dense's, one a sample.
        questions: in all.
    """

    labels: dict[str, Any]
    below_floor: bool
    kept: list[float] = field(default_factory=list)
    losses: list[tuple[float, float]] = field(default_factory=list)
    right: list[tuple[int, int]] = field(default_factory=list)
    questions: int = 0

    @property
    def exercised(self) -> bool:
        """Whether anything was left out; the dense row is what the others are compared with."""
        return self.labels["name"] == "dense" or min(self.kept) < 1.0

    @property
    def told_apart(self) -> bool:
        return sum(dense for _, dense in self.right) >= DENSE_ENOUGH * self.questions

    def row(self) -> dict[str, Any]:
        row = self.labels | {
            "kept": round(statistics.fmean(self.kept), 4),
            "exercised": self.exercised,
            "below_floor": self.below_floor,
        }
        if self.losses:
            own = statistics.fmean(loss for loss, _ in self.losses)
            differences = [own - dense for own, dense in self.losses]
            return row | {"perplexity": math.exp(own)} | _change(differences)
        return (
            row
            | {"told_apart": self.told_apart, "questions": self.questions}
            | _answers(self.right)
        )


def cells(items: Sequence[dict[str, Any]]) -> list[Cell]:
    """Every configuration in every measurement."""
    found: dict[tuple[Any, ...], Cell] = {}
    for record in (record for item in items for record in item["records"]):
        same = {key: record[key] for key in _MEASURED if key in record}
        dense = next(own[3] for own in record["results"] if own[0] == "dense")
        for name, ratio, kept, value in record["results"]:
            labels = same | {"name": name, "ratio": ratio}
            cell = found.setdefault(tuple(labels.values()), Cell(labels, record["below_floor"]))
            cell.kept.append(kept)
            if record["measure"] == "perplexity":
                cell.losses.append((value, dense))
            else:
                cell.right.append((value, dense))
                cell.questions += record["questions"]
    return list(found.values())


_MEASURED = ("measure", "kind", "task", "aware", "tokens")


def summarise(found: Sequence[Cell]) -> list[dict[str, Any]]:
    """A row for each configuration, and for each configuration and length (``tokens``).

    Counted is what left something out, of telling tasks only; the row over all lengths leaves out
    those at which a server with the default floor is dense. Where nothing was left out the row
    says so and has no numbers.
    """
    groups: dict[tuple[str, float, int | None], list[Cell]] = defaultdict(list)
    for cell in found:
        name, ratio, tokens = (cell.labels[key] for key in ("name", "ratio", "tokens"))
        groups[name, ratio, tokens].append(cell)
        if not cell.below_floor:
            groups[name, ratio, None].append(cell)
    summary = []
    for (name, ratio, tokens), own in groups.items():
        counted = [cell for cell in own if cell.exercised]
        kept = [share for cell in counted or own for share in cell.kept]
        row = {
            "measure": "summary",
            "name": name,
            "ratio": ratio,
            "tokens": tokens,
            "kept": round(statistics.fmean(kept), 4),
            "exercised": bool(counted),
            "below_floor": all(cell.below_floor for cell in own),
        }
        losses = [pair for cell in counted for pair in cell.losses]
        right = [pair for cell in counted if cell.right and cell.told_apart for pair in cell.right]
        if losses:
            row |= _change([mine - dense for mine, dense in losses])
        if sum(dense for _, dense in right):
            row |= _answers(right)
            row["questions"] = sum(c.questions for c in counted if c.right and c.told_apart)
        summary.append(row)
    return sorted(
        summary, key=lambda r: (r["tokens"] or 0, r["ratio"], r.get("perplexity_change", 0.0))
    )


def _change(differences: Sequence[float]) -> dict[str, Any]:
    """Of perplexity, by paired differences of losses."""
    count = len(differences)
    spread = statistics.stdev(differences) if count > 1 else math.nan
    return {
        "pieces": count,
        "perplexity_change": math.expm1(statistics.fmean(differences)),
        "perplexity_change_se": None if count < 2 else spread / math.sqrt(count),
        "perplexity_change_most": math.expm1(max(differences)),
    }


def _answers(right: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Share of dense's, and its standard error over the samples, which share a context each."""
    own, dense = (sum(side) for side in zip(*right, strict=True))
    row: dict[str, Any] = {"right": own, "dense_right": dense, "samples": len(right)}
    if dense:
        share, count = own / dense, len(right)
        rest = math.fsum((a - share * b) ** 2 for a, b in right)
        error = math.sqrt(rest * count / (count - 1)) / dense if count > 1 else None
        row |= {"task_accuracy_of_dense": share, "task_accuracy_se": error}
    return row


def print_table(summary: Sequence[dict[str, Any]], ratios: Sequence[float]) -> None:
    """Every ratio over all lengths, that of the targets at each of them."""
    for tokens in sorted({row["tokens"] for row in summary}, key=lambda n: n or 0):
        for ratio in ratios if tokens is None or RATIO not in ratios else (RATIO,):
            print(f"\n{tokens or 'all'} tokens, ratio {ratio}: perplexity change (standard error), "
                  "answers, of dense (standard error)")  # fmt: skip
            for row in summary:
                if (row["ratio"], row["tokens"]) == (ratio, tokens):
                    print(_line(row))


def _line(row: dict[str, Any]) -> str:
    name = f"  {row['name']:32s} "
    if not row["exercised"]:
        return name + "nothing left out"
    change, error, share, spread = (
        100 * (math.nan if row.get(key) is None else row[key])
        for key in (
            "perplexity_change",
            "perplexity_change_se",
            "task_accuracy_of_dense",
            "task_accuracy_se",
        )
    )
    counts = f"{row.get('right', '-')}/{row.get('dense_right', '-')}"
    return f"{name}{change:+8.3f} % ({error:.3f})  {counts:>9s} {share:6.1f} % ({spread:.1f})"


def leads(found: Sequence[Cell], ratio: float = RATIO) -> list[dict[str, Any]]:
    """How far each of our configurations is ahead of the press that comes nearest to it, by
    perplexity, at each length and over all above the floor: paired over the same pieces."""
    pairs: dict[tuple[str, str, int | None], list[tuple[float, float]]] = defaultdict(list)
    by_place = {_place(cell): cell for cell in found if cell.losses}
    presses = {n for (n, *_) in by_place if n.startswith("kvpress ")}
    for cell in by_place.values():
        name, own_ratio, tokens = (cell.labels[key] for key in ("name", "ratio", "tokens"))
        if own_ratio != ratio or name.split(" ")[0] != HySparseConfig.variant or not cell.exercised:
            continue
        for press in presses:
            other = by_place.get((press, *_place(cell)[1:]))
            if other is None or len(other.losses) != len(cell.losses):
                continue
            losses = [a[0] for a in cell.losses], [b[0] for b in other.losses]
            for length in (tokens,) if cell.below_floor else (tokens, None):
                pairs[name, press, length] += zip(*losses, strict=True)
    rows: dict[tuple[str, int | None], dict[str, Any]] = {}
    for (name, press, length), both in pairs.items():
        change = _change([theirs - mine for mine, theirs in both])
        row = {"measure": "lead", "name": name, "ratio": ratio, "tokens": length, "press": press}
        row |= {"pieces": len(both), "lead": change["perplexity_change"]}
        row |= {"lead_se": change["perplexity_change_se"]}
        nearest = rows.setdefault((name, length), row)
        if row["lead"] < nearest["lead"]:
            rows[name, length] = row
    return list(rows.values())


def _place(cell: Cell) -> tuple[Any, ...]:
    """Its configuration, and what it was measured on."""
    labels = cell.labels
    return labels["name"], labels["ratio"], labels.get("kind"), labels["tokens"]


@dataclass(frozen=True)
class Verdict:
    """One configuration against the targets at one length (``None``: all)."""

    name: str
    tokens: int | None
    perplexity: bool | None
    answers: bool | None
    ahead: bool | None
    """Of every press, in both. ``None``: not measured."""


def verdicts(summary: Sequence[dict[str, Any]], ratio: float = RATIO) -> list[Verdict]:
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
    print(f"\ntargets at {RATIO}: perplexity, answers, ahead of every press")
    for each in found:
        marks = (_MARKS[met] for met in (each.perplexity, each.answers, each.ahead))
        print(f"  {each.name:32s} {each.tokens or 'all':>6} tokens  " + "  ".join(marks))


def write_report(files: Sequence[Path], output: Path | None) -> None:
    """Print the sums; with ``output`` save them, and what each kind of text and each task gave at
    the ratio of the targets: dense, with a server's own variant, and by true attention."""
    metas, items = read_metas(files), read_items(files)
    found = cells(items)
    summary = summarise(found)
    print_table(summary, sorted({row["ratio"] for row in summary if row["ratio"]}))
    print_verdicts(verdicts(summary))
    ahead = leads(found)
    for row in ahead:
        lead, error = 100 * row["lead"], 100 * (row["lead_se"] or math.nan)
        place = f"{row['name']:32s} {row['tokens'] or 'all':>6} tokens"
        print(f"  {place}: {lead:+.2f} % ({error:.2f}) ahead of {row['press']}")
    if output is None:
        return
    facts: dict[str, Any] = {}
    for meta in metas:
        facts |= meta
    told = ("date", "commit", "command")
    runs = [{key: meta.get(key) for key in told} for meta in metas if "configurations" in meta]
    seconds = round(sum(item["seconds"] for item in items), 1)
    meta = facts | {"runs": runs, "items": len(items), "seconds_of_items": seconds}
    names = {"dense", "oracle", HySparseConfig.variant}
    details = [
        cell.row()
        for cell in found
        if cell.labels["name"].split(" ")[0] in names and cell.labels["ratio"] in (0.0, RATIO)
    ]
    save(output, meta, [*summary, *ahead, *details])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(argv)
    write_report(options.files, options.output)


if __name__ == "__main__":
    main()
