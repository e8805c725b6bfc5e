"""``bicl hysparse``: calibrate what HySparse chooses by, and how much it may leave out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from bicl.cache.settings import CHOICE_PAGE_SIZE
from bicl.errors import ConfigError
from bicl.sparse.config import MODES, VARIANTS, HySparseConfig

__all__ = ["app"]

T = TypeVar("T")


def _page_size(value: int) -> int:
    """Refused before a model is loaded."""
    from bicl.cache.layout import PAGE_SIZES  # loads torch: not for --help

    if value not in PAGE_SIZES:
        sizes = " or ".join(map(str, PAGE_SIZES))
        raise typer.BadParameter(f"pages have {sizes} tokens, not {value}")
    return value


PageSize = Annotated[int, typer.Option(help="As --block-size: 32 or 64.", callback=_page_size)]

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
    ] = "centroids",
    sparsity_ratio: Annotated[float, typer.Option(help="What it is fitted for.")] = 0.65,
    layers: Annotated[str, typer.Option(help="As --hysparse-layers.")] = "10-28",
    chunks: Annotated[int, typer.Option(min=1, help="Pieces of text to read.")] = 6,
    tokens: Annotated[int, typer.Option(min=64, help="Longest piece.")] = 4096,
    queries: Annotated[int, typer.Option(min=10, help="Queries of each piece to learn from.")] = 96,
    steps: Annotated[int, typer.Option(min=1, help="Of the optimiser.")] = 150,
    page_size: PageSize = CHOICE_PAGE_SIZE,
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


@app.command()
def tune(
    model_id: Annotated[str, typer.Option(help="As for serve: folder, GGUF, hub id, `bundled`.")],
    text: Annotated[list[Path], typer.Option(help="A validation text; repeatable.")],
    output: Annotated[
        Path, typer.Option(help="Folder for results, table, plot and the config file.")
    ] = Path("hysparse-tune"),
    tasks: Annotated[
        Path | None, typer.Option(help='JSON lines: {"prompt": "...", "answer": "..."}.')
    ] = None,
    max_drop: Annotated[
        float, typer.Option(min=0.0, help="Most accuracy that may be lost; 0.003 is 0.3 %.")
    ] = 0.003,
    ratios: Annotated[str, typer.Option(help="Sparsity ratios to try.")] = (
        "0.3,0.5,0.6,0.65,0.7,0.8,0.9"
    ),
    layers: Annotated[str, typer.Option(help="Ranges of layers to try.")] = "10-28;8-23",
    modes: Annotated[str, typer.Option(help="Modes to try.")] = "select",
    max_k: Annotated[str, typer.Option(help="Largest numbers of windows to try.")] = "512",
    floor_tokens: Annotated[
        int, typer.Option(help="As --hysparse-floor-tokens.")
    ] = HySparseConfig.floor_tokens,
    variant: Annotated[
        str, typer.Option(metavar="|".join(VARIANTS), help="What the index holds.")
    ] = "centroids",
    gate: Annotated[Path | None, typer.Option(help="As --hysparse-gate.")] = None,
    pieces: Annotated[int, typer.Option(min=1, help="Pieces of text to read.")] = 4,
    context_tokens: Annotated[int, typer.Option(min=64, help="Prompt of a piece.")] = 4096,
    predicted_tokens: Annotated[int, typer.Option(min=1, help="Predicted after it.")] = 64,
    page_size: PageSize = CHOICE_PAGE_SIZE,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Search the largest sparsity that your texts and tasks allow. Interrupted, it goes on."""
    base = HySparseConfig(
        floor_tokens=floor_tokens, variant=variant, gate_path=None if gate is None else str(gate)
    )
    wanted = _split(modes, ",", str, "--modes")
    if wrong := [mode for mode in wanted if mode not in MODES]:
        raise ConfigError(f"--modes {wrong[0]} is not supported; use one of {', '.join(MODES)}")
    from bicl.frontends.tune import Grid, run_tune  # loads torch: not for --help

    grid = Grid(
        _split(ratios, ",", float, "--ratios"),
        _split(layers, ";", str, "--layers"),
        wanted,
        _split(max_k, ",", int, "--max-k"),
    )
    run_tune(
        model_id,
        text,
        tasks,
        grid,
        output,
        base=base,
        max_drop=max_drop,
        pieces=pieces,
        context=context_tokens,
        predicted=predicted_tokens,
        device=device,
        page_size=page_size,
    )


def _split(text: str, mark: str, kind: Callable[[str], T], flag: str) -> tuple[T, ...]:
    try:
        found = tuple(kind(word.strip()) for word in text.split(mark) if word.strip())
    except ValueError:
        found = ()
    if not found:
        raise ConfigError(f"{flag} {text!r} is no list of values with {mark!r} between them")
    return found
