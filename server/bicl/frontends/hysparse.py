"""``bicl hysparse fit``: calibrate the gate of a model on the user's own text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bicl.cache.settings import CHOICE_PAGE_SIZE
from bicl.errors import ConfigError
from bicl.frontends.http.loader import LoadedModel, load_model, locate, resolve_model
from bicl.frontends.transformers.recording import record_attention
from bicl.sparse.config import HySparseConfig
from bicl.sparse.fit import FitReport, Recording, fit
from bicl.sparse.gate_file import GATE_NAME, save_gate
from bicl.sparse.selection import SelectionRule

__all__ = ["FitRequest", "run_fit"]

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".js", ".ts", ".c", ".h", ".cpp", ".java", ".go",
                 ".rs", ".json", ".html", ".xml", ".yaml", ".sql", ".sh")  # fmt: skip
FIRST_QUERY = 1 / 4
"""Queries are drawn from the last three quarters of a text: before, little can be left out."""


@dataclass(frozen=True)
class FitRequest:
    """What the command was asked for.

    Attributes:
        texts: files, or folders whose text files are taken.
        output: where to write; None: next to the model.
        chunks, tokens: how many pieces of text, how long each may be.
        queries: a piece, whose attention is learnt from.
    """

    model_id: str
    texts: tuple[Path, ...]
    output: Path | None
    config: HySparseConfig
    chunks: int = 6
    tokens: int = 4096
    queries: int = 96
    steps: int = 150
    page_size: int = CHOICE_PAGE_SIZE
    device: str = "cpu"


def run_fit(request: FitRequest, console: Console | None = None) -> FitReport:
    """Load, record, fit, save, report.

    Raises:
        ConfigError: no model, no text, texts too short, or nowhere to save.
    """
    console = console or Console()
    model_id = resolve_model(request.model_id)
    output = request.output or gate_beside(model_id)
    loaded = load_model(model_id, device=request.device)
    layers = _layers(loaded, request.config)
    rule = SelectionRule.of(request.config, request.page_size)
    least = int((rule.always + 8) * request.page_size / (1 - FIRST_QUERY))
    pieces = _pieces(loaded, request, least)
    started = time.perf_counter()
    recordings: dict[int, list[Recording]] = {layer: [] for layer in layers}
    with Progress(console=console) as progress:
        reading = progress.add_task(f"reading {len(pieces)} pieces of text", total=len(pieces))
        for number, ids in enumerate(pieces):
            place = _places(len(ids), request.queries, number)
            for layer, own in record_attention(loaded.model, ids, layers, place).items():
                recordings[layer].append(own)
            progress.advance(reading)
        fitting = progress.add_task("fitting", total=request.steps)
        gate, report = fit(
            recordings,
            request.config.variant,
            rule,
            request.config.sparsity_ratio,
            steps=request.steps,
            progress=lambda done, total: progress.update(fitting, completed=done),
        )
    facts = {
        "model": request.model_id,
        "sha": loaded.sha,
        "sparsity_ratio": str(report.sparsity),
        "page_size": str(request.page_size),
        "texts": ",".join(path.name for path in request.texts),
        "lost_before": f"{report.mean('before'):.5f}",
        "lost_after": f"{report.mean('after'):.5f}",
        "lost_best": f"{report.mean('best'):.5f}",
    }
    save_gate(output, gate, facts)
    _show(console, report, output, time.perf_counter() - started)
    return report


def gate_beside(model_id: str) -> Path:
    """Where the gate of a local model lies.

    Raises:
        ConfigError: a model of the hub has no folder of its own to write to.
    """
    source, _ = locate(model_id, None)
    if not Path(source).is_dir():
        raise ConfigError(
            f"model {model_id!r} comes from the hub, whose cache is no place to write to; say "
            f"where to save: --output {GATE_NAME}, and serve with --hysparse-gate {GATE_NAME}"
        )
    return Path(source) / GATE_NAME


def _layers(loaded: LoadedModel, config: HySparseConfig) -> tuple[int, ...]:
    geometry = loaded.geometry.layers
    layers = config.sparse_layers(len(geometry))
    kept = tuple(n for n in layers if geometry[n].window_left < 0)
    if not kept:
        raise ConfigError(
            f"layers {config.layers} of this model of {len(geometry)} layers name none without a "
            "sliding window; there is nothing to fit"
        )
    return kept


def _pieces(loaded: LoadedModel, request: FitRequest, least: int) -> list[torch.Tensor]:
    """Pieces of the texts in turn, so that each file has its share."""
    limit = min(request.tokens, loaded.max_position)
    if limit < least:
        raise ConfigError(
            f"pieces of {limit} tokens are too short: with these settings at least {least} are "
            "needed before anything is left out; raise --tokens or lower floor_tokens"
        )
    texts = [_encode(loaded, path) for path in _files(request.texts)]
    cut = [[ids[i : i + limit] for i in range(0, len(ids), limit)] for ids in texts]
    turns = [own[n] for n in range(max(map(len, cut))) for own in cut if n < len(own)]
    pieces = [ids for ids in turns if len(ids) >= least][: request.chunks]
    if not pieces:
        raise ConfigError(
            f"no text has {least} tokens; with these settings nothing would be left out of "
            "shorter ones. Give longer texts"
        )
    return pieces


def _files(paths: Sequence[Path]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            found = sorted(f for f in path.rglob("*") if f.suffix in TEXT_SUFFIXES and f.is_file())
            if not found:
                raise ConfigError(f"{path} holds no text file ({', '.join(TEXT_SUFFIXES)})")
            files += found
        elif path.is_file():
            files.append(path)
        else:
            raise ConfigError(f"--text {path}: there is no such file or folder")
    return files


def _encode(loaded: LoadedModel, path: Path) -> torch.Tensor:
    text = path.read_text(errors="replace")
    ids = loaded.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return torch.tensor(ids, dtype=torch.int64, device=loaded.device)


def _places(tokens: int, queries: int, seed: int) -> torch.Tensor:
    first = int(tokens * FIRST_QUERY)
    drawn = torch.randperm(tokens - first, generator=torch.Generator().manual_seed(seed))
    return drawn[:queries].sort().values + first


def _show(console: Console, report: FitReport, output: Path, seconds: float) -> None:
    table = Table(
        title=f"attention lost to pages left out, sparsity {report.sparsity}, held-out queries"
    )
    for column in ("layer", "leaves out", "before", "after", "best possible"):
        table.add_column(column, justify="right")
    for own in report.layers:
        table.add_row(
            str(own.layer),
            f"{100 * own.ratio:.0f} %",
            *(f"{100 * x:.2f} %" for x in (own.before, own.after, own.best)),
        )
    means = (report.mean(what) for what in ("ratio", "before", "after", "best"))
    table.add_section()
    table.add_row("mean", *(f"{100 * x:.2f} %" for x in means))
    console.print(table)
    console.print(
        f"{report.parameters} parameters from {report.queries[0]} queries "
        f"({report.queries[1]} held out) in {seconds:.0f} s, written to {output}"
    )
