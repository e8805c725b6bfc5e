"""What a search for the largest sparsity found: numbers, a table, a plot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bicl.sparse.config import HySparseConfig

__all__ = ["Result", "markdown", "plot", "table"]


@dataclass(frozen=True)
class Result:
    """One setting's measurements.

    Attributes:
        config: as it was tried; a ratio of 0 is dense.
        perplexity: of the predicted tokens.
        top1: share of them that were the model's first choice.
        tasks: share of the tasks answered; ``None`` without tasks.
        skipped: share of all layers' tiles that were left out in decode steps.
    """

    config: HySparseConfig
    perplexity: float
    top1: float
    tasks: float | None
    skipped: float

    def drop(self, dense: Result) -> float:
        """Share of the accuracy that was lost: the worse of perplexity's rise and the tasks'."""
        lost = self.perplexity / dense.perplexity - 1.0
        if self.tasks is None or dense.tasks is None:
            return lost
        return max(lost, dense.tasks - self.tasks)


_COLUMNS = ("mode", "layers", "max K", "ratio", "left out", "perplexity", "top-1", "tasks", "drop")


def _rows(results: Sequence[Result], dense: Result, max_drop: float) -> Iterator[tuple[str, ...]]:
    for each in [dense, *sorted(results, key=lambda each: each.skipped)]:
        config, drop = each.config, each.drop(dense)
        named = ("dense", "-", "-", "0")
        if each is not dense:
            ratio = f"{config.sparsity_ratio:g}"
            named = (config.mode, config.layers, str(config.max_k), ratio)
        told = "not exercised" if each.skipped == 0.0 and each is not dense else f"{drop:.2%}"
        yield (
            *named,
            f"{each.skipped:.1%}",
            f"{each.perplexity:.4f}",
            f"{each.top1:.1%}",
            "-" if each.tasks is None else f"{each.tasks:.1%}",
            told + (" *" if each is not dense and each.skipped > 0.0 and drop <= max_drop else ""),
        )


def table(results: Sequence[Result], dense: Result, max_drop: float) -> Table:
    """For the terminal."""
    made = Table(*_COLUMNS, title=f"HySparse settings; * within a drop of {max_drop:.2%}")
    for row in _rows(results, dense, max_drop):
        made.add_row(*row)
    return made


def markdown(results: Sequence[Result], dense: Result, max_drop: float) -> str:
    """For a file."""
    lines = ["| " + " | ".join(_COLUMNS) + " |", "|" + "---|" * len(_COLUMNS)]
    lines += ["| " + " | ".join(row) + " |" for row in _rows(results, dense, max_drop)]
    return "\n".join(lines) + f"\n\n`*`: within a drop of {max_drop:.2%}.\n"


def plot(
    results: Sequence[Result], dense: Result, max_drop: float, path: Path, console: Console
) -> None:
    """Accuracy lost over tiles left out, a curve for each mode, range of layers and max K."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        console.print("no plot: pip install 'bicl[bench]' brings matplotlib")
        return
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    curves: dict[str, list[Result]] = {}
    for each in results:
        name = f"{each.config.mode} {each.config.layers} K={each.config.max_k}"
        curves.setdefault(name, []).append(each)
    for name, own in curves.items():
        own.sort(key=lambda each: each.skipped)
        x = [100 * each.skipped for each in own]
        axes.plot(x, [100 * each.drop(dense) for each in own], "o-", label=name)
    axes.axhline(100 * max_drop, color="grey", linestyle="--", label="allowed")
    axes.set_xlabel("tiles left out, % of all layers'")
    axes.set_ylabel("accuracy lost, %")
    axes.legend()
    figure.savefig(path, dpi=150)
