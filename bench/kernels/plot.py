"""Draw ``docs/kernels-h200.png`` from a result file: decode over the floor, prefill in TFLOP/s.

``python -m bench.kernels.plot [bench/results/kernels-h200.json] [docs/kernels-h200.png]``
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.kernels.report import find, load_report
from bench.kernels.shapes import DECODE_SHAPES, MAIN_HEADS, PREFILL_SHAPES, prefill_flops

__all__ = ["main", "over_floor", "rates"]

Rows = Sequence[Mapping[str, Any]]

_COLOURS = {
    "bicl": "#0b6e4f",
    "sdpa-cudnn": "#9a9a9a",
    "fa3-p64": "#c9822b",
    "fa3-p128": "#8f5a17",
    "flashinfer-p64-tc": "#5b8bd0",
    "flashinfer-p1-tc": "#3763a8",
    "flashinfer-p1": "#b8403a",
}
_LABELS = {
    "bicl": "BICL",
    "sdpa-cudnn": "cuDNN, contiguous KV (no pages)",
    "fa3-p64": "FlashAttention 3, 64-token pages",
    "fa3-p128": "FlashAttention 3, 128-token pages",
    "flashinfer-p64-tc": "FlashInfer tensor cores, 64-token pages",
    "flashinfer-p1-tc": "FlashInfer tensor cores, 1-token pages",
    "flashinfer-p1": "FlashInfer as TGI calls it",
}
_DECODE = ("bicl", "sdpa-cudnn", "fa3-p64", "flashinfer-p64-tc", "flashinfer-p1-tc")
_DECODE_ALL = (*_DECODE, "flashinfer-p1")
_PREFILL = ("bicl", "fa3-p128", "fa3-p64", "flashinfer-p1")


def over_floor(rows: Rows, impl: str) -> list[float | None]:
    """Time over the floor of each decode shape; None where either was not measured."""
    heads, result = str(MAIN_HEADS), []
    for shape in DECODE_SHAPES:
        ours, floor = (find(rows, "decode", heads, shape, name) for name in (impl, "floor"))
        result.append(None if ours is None or floor is None else ours / floor)
    return result


def rates(rows: Rows, impl: str) -> list[float | None]:
    """TFLOP/s of each prefill shape; None where it was not measured."""
    result = []
    for shape, problem in PREFILL_SHAPES.items():
        us = find(rows, "prefill", str(MAIN_HEADS), shape, impl)
        flops = prefill_flops(problem, MAIN_HEADS.query)
        result.append(None if us is None else flops / us / 1e6)
    return result


def _bars(axes: Any, groups: Sequence[str], series: Mapping[str, list[float | None]]) -> None:
    width = 0.84 / len(series)
    for index, (impl, values) in enumerate(series.items()):
        places = [
            group + (index - (len(series) - 1) / 2) * width
            for group, value in enumerate(values)
            if value is not None
        ]
        heights = [value for value in values if value is not None]
        axes.bar(places, heights, width, label=_LABELS[impl], color=_COLOURS[impl])
    axes.set_xticks(range(len(groups)), groups, rotation=30, ha="right")
    axes.spines[["top", "right"]].set_visible(False)


def _legend(axes: Any) -> None:
    axes.legend(frameon=False, fontsize=8, ncols=7, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = Path("bench/results/kernels-h200.json")
    parser.add_argument("report", nargs="?", type=Path, default=default)
    parser.add_argument("picture", nargs="?", type=Path, default=Path("docs/kernels-h200.png"))
    options = parser.parse_args(arguments)
    document = load_report(options.report)
    draw(document["rows"], document["meta"], options.picture)


def draw(rows: Rows, meta: Mapping[str, Any], picture: Path) -> None:
    """Write the picture; contestants without a single number are left out."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (decode, prefill) = pyplot.subplots(2, 1, figsize=(13, 10), layout="constrained")
    measured = {impl: over_floor(rows, impl) for impl in _DECODE_ALL}
    _bars(decode, list(DECODE_SHAPES), _present(measured))
    decode.axhline(1.0, color="black", linewidth=1, linestyle="--")
    decode.set_ylabel("time / one cold read of the same bytes\n(less is better)")
    decode.set_title(
        f"Decode, batch x context, {MAIN_HEADS} heads, head_dim 128, bf16, cold KV", pad=26
    )
    _legend(decode)
    _bars(prefill, list(PREFILL_SHAPES), _present({i: rates(rows, i) for i in _PREFILL}))
    prefill.set_ylabel("TFLOP/s (more is better)")
    prefill.set_title("Prefill, new + cached tokens, causal, paged KV", pad=26)
    _legend(prefill)
    figure.text(
        0.005,
        0.003,
        f"{meta.get('card')}, torch {meta.get('torch')}, {str(meta.get('date'))[:10]}, "
        f"commit {meta.get('commit')}",
        fontsize=7,
        color="#666666",
    )
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)


def _present(series: Mapping[str, list[float | None]]) -> dict[str, list[float | None]]:
    return {impl: values for impl, values in series.items() if any(v is not None for v in values)}


if __name__ == "__main__":
    main()
