"""``bicl hysparse``: calibrate what HySparse chooses by."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bicl.sparse.config import VARIANTS, HySparseConfig

__all__ = ["app"]

app = typer.Typer(
    help="Calibrate HySparse for a model.", no_args_is_help=True, rich_markup_mode=None
)


@app.callback()
def _root() -> None:
    pass


@app.command()
def fit(
    model_id: Annotated[str, typer.Option(help="As for serve: folder, GGUF, hub id, `bundled`.")],
    text: Annotated[list[Path], typer.Option(help="A text file or a folder of them; repeatable.")],
    output: Annotated[
        Path | None, typer.Option(help="Default: hysparse-gate.safetensors next to the model.")
    ] = None,
    variant: Annotated[
        str, typer.Option(metavar="|".join(VARIANTS), help="What the index holds.")
    ] = "bounds",
    sparsity_ratio: Annotated[float, typer.Option(help="What it is fitted for.")] = 0.65,
    layers: Annotated[str, typer.Option(help="As --hysparse-layers.")] = "10-28",
    chunks: Annotated[int, typer.Option(min=1, help="Pieces of text to read.")] = 6,
    tokens: Annotated[int, typer.Option(min=64, help="Longest piece.")] = 4096,
    queries: Annotated[int, typer.Option(min=10, help="Queries of each piece to learn from.")] = 96,
    steps: Annotated[int, typer.Option(min=1, help="Of the optimiser.")] = 150,
    page_size: Annotated[int, typer.Option(help="As --block-size: 64 or 32.")] = 64,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Teach the gate what your texts attend to: minutes on a CPU for a small model."""
    config = HySparseConfig(sparsity_ratio=sparsity_ratio, layers=layers, variant=variant)
    from bicl.frontends.hysparse import FitRequest, run_fit  # loads torch: not for --help

    run_fit(
        FitRequest(
            model_id, tuple(text), output, config, chunks, tokens, queries, steps, page_size, device
        )
    )
