"""Draw ``docs/hysparse-quality.png``: what each choice of keys costs, at every ratio (lines, of one
result file) and at that of the targets (bars, of another).

``python -m bench.hysparse.plot [--bars FILE] [--lines FILE] [--output FILE.png]``
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.hysparse.report import RATIO

__all__ = ["curves", "main"]

Rows = Sequence[Mapping[str, Any]]

STYLES = {
    "centroids": ("#0b6e4f", "-", "BICL: centroids of a page's keys"),
    "centroids served": ("#0b6e4f", "--", "as served, pages of 64"),
    "centroids fitted": ("#6cc3a0", "-", "fitted"),
    "centroids served fitted": ("#6cc3a0", "--", "as served, pages of 64, fitted"),
    "centroids served pages-32": ("#1f3d7a", "--", "as served: floor, kinds of text, pages of 32"),
    "bounds": ("#e377c2", "-", "weighted boxes a page"),
    "quest": ("#5b8bd0", "-", "min/max a page (Quest)"),
    "literal": ("#c9822b", "-", "literal: softmax in windows, tokens"),
    "raw-global": ("#e0b040", "-", "cosine of tokens"),
    "oracle": ("#9a9a9a", "--", "oracle, pages"),
    "sink-recent": ("#b8403a", ":", "first and recent"),
    "random": ("#d9a09d", ":", "random"),
}
PRESSES = "#7a4fa3"


def curves(rows: Rows, value: str) -> dict[str, list[tuple[float, float]]]:
    """Name to (ratio, value) of the summary rows that have one."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in _sums(rows):
        if row["name"] in STYLES and row.get(value) is not None:
            found.setdefault(row["name"], []).append((row["ratio"], row[value]))
    return {name: sorted(points) for name, points in found.items()}


def _sums(rows: Rows) -> list[Mapping[str, Any]]:
    """Over all lengths at which a server leaves anything out."""
    return [row for row in rows if row["measure"] == "summary" and row["tokens"] is None]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    results = Path("bench/results")
    parser.add_argument("--bars", type=Path, default=results / "hysparse-quality.json")
    parser.add_argument("--lines", type=Path, default=results / "hysparse-quality-presses.json")
    parser.add_argument("--output", type=Path, default=Path("docs/hysparse-quality.png"))
    options = parser.parse_args(argv)
    bars, lines = (json.loads(path.read_text()) for path in (options.bars, options.lines))
    _draw(bars["rows"], lines["rows"], bars["meta"], options.output)
    print("written to", options.output)


PANELS = (
    ("perplexity_change", "perplexity_change_se", "perplexity, change to dense (%)", 0.5),
    ("task_accuracy_of_dense", "task_accuracy_se", "task answers right, of dense (%)", 99.5),
)
"""Value of a summary row, its standard error, its label, the target."""


def _draw(bars: Rows, lines: Rows, meta: Mapping[str, Any], target: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(12, 11), layout="constrained", height_ratios=(4, 7))
    at_ratio = [row for row in _sums(bars) if row["ratio"] == RATIO]
    for above, below, panel in zip(*axes, PANELS, strict=True):
        _lines(above, lines, *panel)
        _bars(below, at_ratio, *panel)
        for axis in (above, below):
            axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_yscale("symlog", linthresh=1.0)
    axes[1][0].set_xscale("symlog", linthresh=1.0)
    axes[0][1].legend(frameon=False, fontsize=8)
    axes[0][0].set_title("all ratios: fewer inputs than below", fontsize=9)
    figure.suptitle(_title(bars, meta), fontsize=10)
    figure.savefig(target, dpi=130)
    plt.close(figure)


def _lines(axis: Any, rows: Rows, value: str, _: str, label: str, goal: float) -> None:
    for name, points in curves(rows, value).items():
        colour, line, title = STYLES[name]
        width = 2.2 if name.startswith("centroids") else 1.2
        ratios, values = zip(*points, strict=True)
        percent = [100 * v for v in values]
        axis.plot(ratios, percent, line, color=colour, label=title, linewidth=width, marker=".")
    axis.axhline(goal, color="#cccccc", linewidth=0.8)
    axis.set_xlabel("share of the keys left out in a sparse layer")
    axis.set_ylabel(label)


def _bars(axis: Any, sums: Rows, value: str, error: str, label: str, goal: float) -> None:
    """All configurations at the targets' ratio, the best on top, with one standard error."""
    known = [row for row in sums if row.get(value) is not None]
    known.sort(key=lambda row: row[value], reverse=value == "perplexity_change")
    axis.barh(
        [row["name"] for row in known],
        [100 * row[value] for row in known],
        xerr=[100 * (row.get(error) or 0.0) for row in known],
        color=[_colour(row["name"]) for row in known],
        error_kw={"ecolor": "#555555", "elinewidth": 0.8},
    )
    axis.axvline(goal, color="#888888", linewidth=0.8, linestyle=":")
    axis.tick_params(axis="y", labelsize=8)
    axis.set_xlabel(f"{label}, {RATIO:.0%} of the keys left out")


def _colour(name: str) -> str:
    if name.startswith("kvpress"):
        return PRESSES
    return STYLES.get(name, STYLES.get(name.split(" ")[0], ("#c9c9c9",)))[0]


def _title(rows: Rows, meta: Mapping[str, Any]) -> str:
    sums = [row for row in rows if row["measure"] == "summary" and row["tokens"]]
    lengths = sorted(row["tokens"] for row in sums if not row["below_floor"])
    return (
        f"SmolLM2-135M, {len(meta['sparse_layers'])} of {meta['depth']} layers sparse, contexts "
        f"of {lengths[0]:,} to {lengths[-1]:,} tokens, one standard error"
    )


if __name__ == "__main__":
    main()
