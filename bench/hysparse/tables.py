"""The tables of ``docs/hysparse.md``, from a result file.

``python -m bench.hysparse.tables [bench/results/hysparse-quality.json]`` prints them as Markdown.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.hysparse.report import RATIO

__all__ = ["by_length", "by_ratio", "main", "of_presses"]

Rows = Sequence[Mapping[str, Any]]

TITLES = {
    "centroids served pages-32": "**`centroids`, as served**",
    "centroids served fitted pages-32": "as served, fitted",
    "centroids served": "**pages of 64 (`--block-size 64`)**",
    "centroids served fitted": "pages of 64, fitted",
    "centroids floor": "pages of 64, `--hysparse-text-kind off`",
    "centroids-unturned served": "pages of 64, index rounded unturned",
    "centroids-16 served": "pages of 64, 16 centroids a page (no kernel)",
    "centroids-both served pages-32": "by two steps' queries (no kernel)",
    "centroids-half served pages-32": "half of the pages by the last step's query (no kernel)",
    "centroids-ahead served pages-32": "all pages by the last step's query (no kernel)",
    "centroids-both served": "pages of 64, by two steps' queries (no kernel)",
    "centroids-half served": "pages of 64, half by the last step's query (no kernel)",
    "centroids-ahead served": "pages of 64, all by the last step's query (no kernel)",
    "oracle served pages-32": "pages by true attention, as served",
    "oracle served": "pages of 64 by true attention",
    "centroids pages-32": "floor off",
    "centroids": "floor off, pages of 64",
    "centroids fitted": "floor off, pages of 64, fitted",
    "centroids-unturned": "floor off, pages of 64, index rounded unturned",
    "oracle": "pages of 64 by true attention, floor off",
}
"""Of the configurations that a server can run, of other indexes, and of the best choice of pages
there is."""

CHOICES = {
    "literal": "literal: softmax in windows, tokens (no kernel)",
    "tile-token": "half by tiles, half by tokens (no kernel)",
    "raw-global": "cosine of tokens, compared over all (no kernel)",
    "gate": "`gate`",
    "bounds": "`bounds`",
    "quest": "Quest's bounds",
    "sink-recent": "first and newest pages",
    "random": "random pages",
}
"""Other ways to choose, and the baselines."""


def by_length(rows: Rows, ratio: float = RATIO) -> str:
    """At one ratio: perplexity, its standard error, and answers at every length."""
    sums = _sums(rows)
    lengths = sorted({tokens for _, own, tokens in sums if own == ratio and tokens})
    lines = [_line(["", *(f"{length:,}" for length in lengths)]), "|---" * (len(lengths) + 1) + "|"]
    for name, title in TITLES.items():
        found = [sums.get((name, ratio, length)) for length in lengths]
        if any(found):
            lines.append(_line([title, *(_cell(row) for row in found)]))
    return "\n".join(lines)


def by_ratio(rows: Rows, titles: Mapping[str, str] = TITLES | CHOICES) -> str:
    """Over all lengths above the floor: perplexity and answers at every ratio; presses last."""
    sums = _sums(rows)
    ratios = sorted({ratio for _, ratio, _ in sums if ratio})
    presses = sorted({name for name, *_ in sums if name.startswith("kvpress ")})
    titles = titles | {name: f"{name.split(' ')[1]} (kvpress)" for name in presses}
    lines = [_line(["", *map(str, ratios)]), "|---" * (len(ratios) + 1) + "|"]
    for name, title in titles.items():
        found = [sums.get((name, ratio, None)) for ratio in ratios]
        if any(found):
            lines.append(_line([title, *(_short(row) for row in found)]))
    return "\n".join(lines)


def of_presses(rows: Rows, ratio: float = RATIO) -> str:
    """kvpress at one ratio: the best perplexity over all lengths first."""
    sums = _sums(rows)
    lengths = sorted({tokens for _, own, tokens in sums if own == ratio and tokens})
    names = {name for name, own, _ in sums if name.startswith("kvpress ") and own == ratio}
    head = [f"{length:,}" for length in lengths]
    lines = [_line(["", "all above the floor", *head]), "|---" * (len(lengths) + 2) + "|"]

    def change(name: str) -> float:
        return float(sums[name, ratio, None]["perplexity_change"])

    titles = (("centroids pages-32", "**`centroids`, floor off**"), ("centroids", "pages of 64"))
    ours = {name: title for name, title in titles if (name, ratio, None) in sums}
    for name in (*ours, *sorted(names, key=change)):
        title = ours.get(name) or name.split(" ")[1]
        cells = [_cell(sums.get((name, ratio, length))) for length in (None, *lengths)]
        lines.append(_line([title, *cells]))
    return "\n".join(lines)


def _sums(rows: Rows) -> dict[tuple[str, float, int | None], Mapping[str, Any]]:
    sums = [row for row in rows if row["measure"] == "summary"]
    return {(row["name"], row["ratio"], row["tokens"]): row for row in sums}


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    if not row["exercised"]:
        return "nothing left out"
    parts = []
    if "perplexity_change" in row:
        parts.append(f"{100 * row['perplexity_change']:+.2f} %")
        parts[0] += f" ({100 * row['perplexity_change_se']:.2f})"
    if "right" in row:
        parts.append(f"{row['right']} of {row['dense_right']}")
    return ", ".join(parts)


def _short(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    change, share = (100 * row[key] for key in ("perplexity_change", "task_accuracy_of_dense"))
    return f"{change:+.1f} %, {share:.0f} %"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("source", nargs="?", default="bench/results/hysparse-quality.json")
    rows = json.loads(Path(parser.parse_args(argv).source).read_text())["rows"]
    for table in (by_length(rows), by_ratio(rows), of_presses(rows)):
        print(table, end="\n\n")


if __name__ == "__main__":
    main()
