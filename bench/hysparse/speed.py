"""What reading a choice of pages saves: attention of one layer, and a whole decode step.

    python -m bench.hysparse.speed --out bench/results/hysparse-h200.json

``layer``: 32 query and 8 KV heads, head_dim 128, bf16, pages of ``--page-size`` tokens. Each number
is one layer's part of a decode step, store included, in a replayed CUDA graph, KV and index cold,
contestants in turns:

* ``dense``      store, attention over all pages
* ``sparse``     store and index, choice of tiles, attention over them, as in all sparse layers of
  a step but the first, which does not know beforehand how many tokens it reads
* ``read only``  store, attention over a choice made beforehand; ``sparse`` minus this is what
  indexing and choosing cost
* ``choice``     the choice alone, one after the other

``served`` says what a server does with such a step: where less than ``min_skipped_mb`` of a layer
would be left out, it runs dense.

``pages``, where pages are not of 64: dense attention over them and over pages of 64, in turns.

``memory``: the same engine in compact mode: pages that a long prompt holds in the sparse layers
after its prefill, in bytes, beside those of the full cache.

``step``: a random Llama of 8B shape in the embedded engine's own runner, its CUDA graphs replayed
on full pages, with and without sparsity, in turns. Weights and pages are random: for time their
content does not matter.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.kernels import machine
from bench.kernels.arena import Arena, PagedBatch
from bench.kernels.shapes import HEAD_DIM, MAIN_HEADS, PREFILL_SHAPES, kv_bytes
from bench.serving.random_model import random_llama
from bench.targets import Verdict
from bench.timing import compare
from bicl.attention.cuda import CudaBackend
from bicl.attention.metadata import AttentionMetadata
from bicl.cache.layout import PAGE_SIZES, PageLayout
from bicl.frontends.http.engine import Engine
from bicl.frontends.http.engine.config import EngineConfig
from bicl.frontends.http.engine.runner import ModelRunner
from bicl.frontends.http.loader import LoadedModel
from bicl.frontends.http.request import GenerationParams, GenerationRequest
from bicl.sparse.backend import SparseBackend
from bicl.sparse.config import WINDOW_TOKENS, HySparseConfig
from bicl.sparse.guard import GuardBounds
from bicl.sparse.index import index_bytes, make_indexes
from bicl.sparse.selection import least_skipped

SECTIONS = ("layer", "pages", "step", "memory")
SCALE = HEAD_DIM**-0.5
CONTEXTS = (4096, 32768, 131072)
BATCHES = (1, 8, 16)
STEP_BATCH, STEP_CONTEXT = 8, 32768
DENSE_DECODE = ((1, 4096), (8, 4096), (8, 32768), (32, 16384))
COMPACT_RATIO, COMPACT_TOKENS = 0.71, 32000
SOURCE_GB = 14.3
"""KV of the source's example, which it says shrinks to 4.1."""
ARENA_BYTES = 20 << 30
DRAM_BYTES_PER_US = 4.55e6
COLD_INDEX_BYTES = 1 << 27
GRAPH_US = 60_000.0
"""Long: a replay is sized by eager calls, which a busy host stretches, and its start counts."""
INDEX = HySparseConfig.variant


def page_layout(page: int) -> PageLayout:
    return PageLayout(MAIN_HEADS.kv, HEAD_DIM, torch.bfloat16, page, tile=page)


def layer_row(
    arena: Arena, context: int, batch: int, config: HySparseConfig, rounds: int, page: int = 64
) -> dict[str, Any]:
    """One shape of the ``layer`` section."""
    tokens = context - page // 2  # one step in a page completes it; this is one of the others
    sequences = PagedBatch.decode(arena, MAIN_HEADS, (tokens,) * batch)
    layout = page_layout(page)
    layer = arena.tiles(layout, sequences.num_pages(page))
    dense = CudaBackend()
    # KV passes the cache by, so the index must be cold by itself, as behind a model's other layers.
    copies = -(-COLD_INDEX_BYTES // (layer.num_pages * index_bytes(layout, INDEX, layout.dtype)))
    backends = [
        SparseBackend(dense, config, make_indexes({0: layer}, INDEX, layout.dtype))
        for _ in range(copies)
    ]
    sparsity = torch.full((batch,), config.sparsity_ratio, device="cuda")
    for backend in backends:
        backend.index_pages(0, torch.arange(layer.num_pages, device="cuda"))
        backend.plan(replace(sequences.metadata(page)[0], sparsity=sparsity))
    key, value = torch.randn(2, batch, MAIN_HEADS.kv, HEAD_DIM, device="cuda").bfloat16()
    out = torch.empty_like(sequences.query)
    metas = [_storing(meta, sparsity, page) for meta in sequences.metadata(page)]
    sparse = [(backend, meta) for backend in backends for meta in metas]
    chosen = [_selected(backends[0], sequences.query, meta) for meta in metas]

    def run(backend: CudaBackend | SparseBackend, meta: AttentionMetadata) -> None:
        backend.store(layer, key, value, meta.slot_mapping)
        backend.run(sequences.query, layer, meta, scale=SCALE, out=out)

    comparison = compare(
        {
            "dense": [partial(run, dense, meta) for meta in metas],
            "sparse": [partial(run, backend, meta) for backend, meta in sparse],
            "read only": [partial(run, dense, meta) for meta in chosen],
            "choice": [partial(_selected, b, sequences.query, meta) for b, meta in sparse],
        },
        rounds=rounds,
        graph_us=GRAPH_US,
    )
    if comparison.errors:
        raise RuntimeError(f"batch {batch}, context {context}: {comparison.errors}")
    us = {name: sample.median for name, sample in comparison.samples.items()}
    tiles = -(-tokens // page)
    least = least_skipped(config, layout, arena.device)
    kept = -(-int(chosen[0].cache_seqlens[0]) // page)
    read = kv_bytes((kept * page,) * batch, MAIN_HEADS.kv)
    scored = batch * tiles * index_bytes(layout, INDEX, layout.dtype)
    return {
        "context": context,
        "tokens": tokens,
        "batch": batch,
        "max_k": config.max_k,
        "tiles": tiles,
        "kept": kept,
        "skipped_mb": batch * (tiles - kept) * layout.page_bytes / 1e6,
        "served": "sparse" if batch * (tiles - kept) >= least else "dense",
        "us": us,
        "spread": {n: [s.p20, s.p80] for n, s in comparison.samples.items()},
        "floor_us": {
            "dense": kv_bytes((tokens,) * batch, MAIN_HEADS.kv) / DRAM_BYTES_PER_US,
            "sparse": (read + scored) / DRAM_BYTES_PER_US,
        },
        "speedup": us["dense"] / us["sparse"],
        "selection_us": us["sparse"] - us["read only"],
        "selection_share": (us["sparse"] - us["read only"]) / us["sparse"],
    }


def _selected(
    backend: SparseBackend, query: torch.Tensor, meta: AttentionMetadata
) -> AttentionMetadata:
    return backend.select(query, backend.indexes[0], meta, SCALE)


def _storing(meta: AttentionMetadata, sparsity: torch.Tensor, size: int) -> AttentionMetadata:
    """The step that stores each sequence's newest token."""
    last = meta.cache_seqlens.long() - 1
    page = meta.page_table.gather(1, (last // size)[:, None])[:, 0]
    return replace(meta, slot_mapping=page * size + last % size, sparsity=sparsity)


def pages_section(page: int, rounds: int) -> list[dict[str, Any]]:
    """Dense attention of a layer over pages of 64 tokens and of ``page``."""
    arena, backend, rows = Arena(ARENA_BYTES), CudaBackend(), []
    shapes = {n: PagedBatch.prefill(arena, MAIN_HEADS, s) for n, s in PREFILL_SHAPES.items()}
    for batch, context in DENSE_DECODE:
        lengths = (context,) * batch
        shapes[f"decode {batch}x{context}"] = PagedBatch.decode(arena, MAIN_HEADS, lengths)
    for name, sequences in shapes.items():
        calls: dict[str, list[Callable[[], object]]] = {}
        for size in (64, page):
            layer = arena.tiles(page_layout(size), sequences.num_pages(size))
            query, out = sequences.query, torch.empty_like(sequences.query)
            run = partial(backend.run, query, layer, scale=SCALE, out=out)
            calls[str(size)] = [partial(run, meta=meta) for meta in sequences.metadata(size)]
        samples = compare(calls, rounds=rounds).samples
        rows.append({"shape": name, "us": {size: each.median for size, each in samples.items()}})
    return rows


def step_section(loaded: LoadedModel, ratio: float, rounds: int, page: int = 64) -> dict[str, Any]:
    """A whole decode step of the embedded engine, dense and sparse."""
    pages = STEP_CONTEXT // page
    config = EngineConfig(
        max_total_tokens=STEP_CONTEXT,
        max_batch_size=STEP_BATCH,
        page_size=page,
        hysparse=HySparseConfig(sparsity_ratio=ratio),
    )
    runner = ModelRunner(loaded, config, STEP_BATCH * pages)
    for layer in runner.pool.layers:
        layer.pages.normal_(std=0.5)
    assert runner.shadow is not None
    assert runner.graphs is not None
    sparse = runner.shadow.sparse
    for number in sparse.indexes:
        sparse.index_pages(number, torch.arange(runner.pool.num_pages, device="cuda"))
    runner.graphs._sizes = [STEP_BATCH]  # the others would only take time
    runner.graphs.capture()
    table = np.random.default_rng(0).permutation(STEP_BATCH * pages).astype(np.int32)
    table = table.reshape(STEP_BATCH, pages)
    tokens = STEP_CONTEXT - page // 2
    last = tokens - 1
    step = (
        np.full(STEP_BATCH, 5),
        np.full(STEP_BATCH, last),
        table,
        np.full(STEP_BATCH, tokens, dtype=np.int32),
        table[:, -1].astype(np.int64) * page + last % page,
    )
    sparsity = np.full(STEP_BATCH, ratio, dtype=np.float32)
    calls: dict[str, Callable[[], object]] = {
        "dense": partial(runner.graphs.replay, *step),
        "sparse": partial(runner.graphs.replay, *step, sparsity),
    }
    us = _alternating(calls, rounds)
    return {
        "model": "Llama-3.1-8B shape, random weights, bf16",
        "unfused": list(loaded.notes),
        "batch": STEP_BATCH,
        "context": STEP_CONTEXT,
        "tokens": tokens,
        "layers": loaded.model.config.num_hidden_layers,
        "sparse_layers": len(sparse.indexes),
        "us": us,
        "speedup": us["dense"] / us["sparse"],
    }


def memory_section(loaded: LoadedModel, page: int = 64) -> dict[str, Any]:
    """What a prompt holds in compact mode, by the pools' own books."""
    engine = Engine(
        loaded,
        EngineConfig(
            max_total_tokens=STEP_CONTEXT,
            max_batch_size=1,
            max_batch_prefill_tokens=8192,
            page_size=page,
            prefix_caching=False,
            cuda_graphs=False,
            hysparse=HySparseConfig(sparsity_ratio=COMPACT_RATIO, mode="compact", text_kind="off"),
            guard=GuardBounds(min_mass_kept=0.0),  # random weights attend everywhere
        ),
    )
    prompt = tuple(np.random.default_rng(0).integers(4, 1000, COMPACT_TOKENS).tolist())
    engine.submit(GenerationRequest("r", prompt, GenerationParams(8, ignore_eos=True)))
    while engine.snapshot().generated_tokens < 2:
        engine.step()
    stats = engine.snapshot()
    layers = loaded.model.config.num_hidden_layers
    compact = len(HySparseConfig().sparse_layers(layers))
    size = page_layout(page).page_bytes
    kept = stats.sparse.compact_pages["in_use"] if stats.sparse is not None else 0
    whole = layers * stats.pages_in_use * size
    held = ((layers - compact) * stats.pages_in_use + compact * kept) * size
    return {
        "ratio": COMPACT_RATIO,
        "tokens": COMPACT_TOKENS,
        "full_pages": stats.pages_in_use,
        "compact_pages": kept,
        "kept_share": kept / stats.pages_in_use,
        "bytes": {"full": whole, "compact": held},
        "source_gb": {"full": SOURCE_GB, "compact": SOURCE_GB * held / whole},
    }


def targets(result: dict[str, Any]) -> list[Verdict]:
    """What was promised of a sparse layer and of a whole step, at ratio 0.65."""
    found = []
    for row in result.get("layer", ()):
        shape = f"{row['batch']} x {row['context']}, {row['kept']} of {row['tiles']} tiles"
        share = row["selection_share"]
        found.append(Verdict(f"choosing, of a sparse layer's time, {shape}", share, 0.15, unit=""))
        if wanted := {32768: 2.3, 131072: 2.5}.get(row["context"]):
            faster = Verdict(f"sparse layer, {shape}", row["speedup"], wanted, at_most=False)
            found.append(faster)
    if step := result.get("step"):
        shape = f"{step['batch']} x {step['context']}"
        found.append(Verdict(f"whole step, {shape}", step["speedup"], 1.25, at_most=False))
    if memory := result.get("memory"):
        what = f"compact pages of the sparse layers at {memory['ratio']}"
        found.append(Verdict(what, memory["kept_share"], 0.3, unit=""))
    return found


def _alternating(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median device time of each call in us, taken in turns, every second round reversed."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 2):
        order = list(calls) if number % 2 else list(reversed(calls))
        for name in order:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            calls[name]()
            end.record()
            end.synchronize()
            if number >= 2:
                times[name].append(begin.elapsed_time(end) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("bench/results/hysparse-h200.json"))
    parser.add_argument("--ratio", type=float, default=0.65)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--page-size", type=int, choices=PAGE_SIZES, default=64)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--commit", help="of the sources, where there is no repository to ask")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _arguments(arguments)
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device", file=sys.stderr)
        return 2
    meta = machine.describe({}, options.commit)
    page = options.page_size
    result: dict[str, Any] = {"meta": meta, "ratio": options.ratio, "page_size": page}
    if "layer" in options.sections:
        result["layer"] = []
        for row in layer_section(options.ratio, options.rounds, page):
            result["layer"].append(row)
            print(_line(row), flush=True)
            _save(result, options.out)
        torch.cuda.empty_cache()
    if "pages" in options.sections and page != 64:
        result["pages"] = pages_section(page, options.rounds)
        print(f"pages: {result['pages']}", flush=True)
        _save(result, options.out)
        torch.cuda.empty_cache()
    if {"step", "memory"} & set(options.sections):
        loaded = random_llama("8b", "cuda", torch.bfloat16)
    if "step" in options.sections:
        result["step"] = step = step_section(loaded, options.ratio, options.rounds * 3, page)
        print(f"step: {step['us']}, {step['speedup']:.2f}x", flush=True)
        _save(result, options.out)
        torch.cuda.empty_cache()
    if "memory" in options.sections:
        result["memory"] = memory = memory_section(loaded, page)
        print(f"memory: {memory}", flush=True)
    verdicts = targets(result)
    result["targets"] = [str(verdict) for verdict in verdicts]
    _save(result, options.out)
    print("\n".join(result["targets"]))
    print(f"{sum(verdict.passed for verdict in verdicts)} of {len(verdicts)} targets met")
    return 0


def layer_section(ratio: float, rounds: int, page: int) -> Iterator[dict[str, Any]]:
    """All shapes with the ratio alone in force, and those in which the default max_k decides."""
    arena = Arena(ARENA_BYTES)
    whole = HySparseConfig(sparsity_ratio=ratio, max_k=CONTEXTS[-1] // WINDOW_TOKENS)
    capped = HySparseConfig(sparsity_ratio=ratio)
    shapes = [(context, batch, whole) for context in CONTEXTS for batch in BATCHES]
    shapes += [(CONTEXTS[-1], batch, capped) for batch in BATCHES]
    for context, batch, config in shapes:
        yield layer_row(arena, context, batch, config, rounds, page)


def _save(result: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(result, indent=1) + "\n")


def _line(row: dict[str, Any]) -> str:
    us = ", ".join(f"{name} {value:.1f}" for name, value in row["us"].items())
    return (
        f"{row['batch']} x {row['context']}: {row['kept']} of {row['tiles']} tiles; {us} us; "
        f"{row['speedup']:.2f}x, selection {row['selection_us']:.1f} us "
        f"({row['selection_share']:.0%}); served {row['served']}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
