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
    "bounds": ("#0b6e4f", "-", "BICL: weighted boxes a page (default)"),
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
        if row["measure"] == "summary" and row["name"] in STYLES and row.get(value) is not None:
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


def _draw(rows: Rows, meta: Mapping[str, Any], target: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(12, 4.6), layout="constrained")
    panels = (
        ("perplexity_change", "perplexity, change to dense (%)", 100.0, 0.5),
        ("task_accuracy_of_dense", "task answers right, of dense (%)", 100.0, 99.5),
    )
    for axis, (value, label, factor, goal) in zip(axes, panels, strict=True):
        for name, points in curves(rows, value).items():
            colour, line, title = STYLES[name]
            width = 2.4 if name == "bounds" else 1.2
            ratios, values = zip(*points, strict=True)
            axis.plot(
                ratios,
                [factor * v for v in values],
                line,
                color=colour,
                label=title,
                linewidth=width,
                marker="o",
                markersize=3,
            )
        axis.axhline(goal, color="#cccccc", linewidth=0.8)
        axis.set_xlabel("share of the keys left out in a sparse layer")
        axis.set_ylabel(label)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_yscale("symlog", linthresh=1.0)
    axes[1].legend(frameon=False, fontsize=8)
    depth, layers = meta["depth"], meta["sparse_layers"]
    figure.suptitle(
        f"SmolLM2-135M, {len(layers)} of {depth} layers sparse, contexts of 2k to 8k tokens",
        fontsize=10,
    )
    figure.savefig(target, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
