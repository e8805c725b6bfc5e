"""Draw ``docs/hysparse-quality.png`` from a result file: what each choice of keys costs.

``python -m bench.hysparse.plot [bench/results/hysparse-quality.json] [docs/hysparse-quality.png]``
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["curves", "main"]

Rows = Sequence[Mapping[str, Any]]

STYLES = {
    "centroids": ("#0b6e4f", "-", "BICL: centroids of a page's keys"),
    "bounds": ("#e377c2", "-", "weighted boxes a page"),
    "quest": ("#5b8bd0", "-", "min/max a page (Quest)"),
    "literal": ("#c9822b", "-", "literal: softmax in windows, tokens"),
    "oracle": ("#9a9a9a", "--", "oracle, pages"),
    "sink-recent": ("#b8403a", ":", "first and recent"),
    "kvpress SnapKV": ("#7a4fa3", "-.", "kvpress SnapKV"),
    "kvpress AdaKV-SnapKV": ("#b48ad6", "-.", "kvpress AdaKV (SnapKV)"),
    "kvpress ExpectedAttention": ("#3d3d3d", "-.", "kvpress ExpectedAttention"),
    "kvpress ObservedAttention": ("#8f5a17", "-.", "kvpress ObservedAttention"),
}


def curves(rows: Rows, value: str) -> dict[str, list[tuple[float, float]]]:
    """Name to (ratio, value) of the summary rows that have one."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["measure"] != "summary" or row["tokens"] is not None:
            continue
        if row["name"] in STYLES and row.get(value) is not None:
            found.setdefault(row["name"], []).append((row["ratio"], row[value]))
    return {name: sorted(points) for name, points in found.items()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("source", nargs="?", default="bench/results/hysparse-quality.json")
    parser.add_argument("target", nargs="?", default="docs/hysparse-quality.png")
    options = parser.parse_args(argv)
    report = json.loads(Path(options.source).read_text())
    _draw(report["rows"], report["meta"], Path(options.target))
    print("written to", options.target)


PANELS = (
    ("perplexity_change", "perplexity, change to dense (%)", 0.5),
    ("task_accuracy_of_dense", "task answers right, of dense (%)", 99.5),
)
"""Value of a summary row, its label, the target."""


def _draw(rows: Rows, meta: Mapping[str, Any], target: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    summary = [row for row in rows if row["measure"] == "summary" and row["ratio"]]
    summary = [row for row in summary if row["tokens"] is None]
    ratios = sorted({row["ratio"] for row in summary})
    size = (12, 4.6) if len(ratios) > 1 else (12, 7)
    figure, axes = plt.subplots(1, 2, figsize=size, layout="constrained")
    for axis, panel in zip(axes, PANELS, strict=True):
        if len(ratios) > 1:
            _lines(axis, rows, *panel)
        else:
            _bars(axis, summary, *panel)
        axis.spines[["top", "right"]].set_visible(False)
    if len(ratios) > 1:
        axes[0].set_yscale("symlog", linthresh=1.0)
        axes[1].legend(frameon=False, fontsize=8)
    figure.suptitle(_title(rows, meta, ratios), fontsize=10)
    figure.savefig(target, dpi=150)
    plt.close(figure)


def _lines(axis: Any, rows: Rows, value: str, label: str, goal: float) -> None:
    for name, points in curves(rows, value).items():
        colour, line, title = STYLES[name]
        width = 2.4 if name == "centroids" else 1.2
        ratios, values = zip(*points, strict=True)
        percent = [100 * v for v in values]
        axis.plot(ratios, percent, line, color=colour, label=title, linewidth=width, marker=".")
    axis.axhline(goal, color="#cccccc", linewidth=0.8)
    axis.set_xlabel("share of the keys left out in a sparse layer")
    axis.set_ylabel(label)


def _bars(axis: Any, summary: Rows, value: str, label: str, goal: float) -> None:
    """All configurations at one ratio, the best on top, with one standard error."""
    known = [row for row in summary if row.get(value) is not None]
    known.sort(key=lambda row: row[value], reverse=value == "perplexity_change")
    error = [100 * (row.get(f"{value}_se") or 0.0) for row in known]
    axis.barh(
        [row["name"] for row in known],
        [100 * row[value] for row in known],
        xerr=error if any(error) else None,
        color=[STYLES.get(row["name"], ("#c9c9c9",))[0] for row in known],
        error_kw={"ecolor": "#555555", "elinewidth": 0.8},
    )
    axis.axvline(goal, color="#888888", linewidth=0.8, linestyle=":")
    axis.tick_params(axis="y", labelsize=8)
    axis.set_xlabel(label)


def _title(rows: Rows, meta: Mapping[str, Any], ratios: Sequence[float]) -> str:
    lengths = sorted({row["tokens"] for row in rows if row["measure"] != "summary"})
    share = "" if len(ratios) > 1 else f", {ratios[0]:.0%} of the keys left out in them"
    return (
        f"SmolLM2-135M, {len(meta['sparse_layers'])} of {meta['depth']} layers sparse{share}, "
        f"contexts of {' to '.join(map(str, dict.fromkeys((lengths[0], lengths[-1]))))} tokens"
    )


if __name__ == "__main__":
    main()
