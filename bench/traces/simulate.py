"""Token hit rate of our bookkeeping on traces, beside the ideal for the same capacity.

    python -m bench.traces.simulate TRACE.jsonl ... [--out FILE]

Every request goes through ``CacheManager`` as the engine would send it, with token ids made from
the trace's block names, one after the other and without a model; replies are inserted too. The
bounds are defined in :mod:`bench.traces.ideal`; other eviction policies than ours are simulated
there as well.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.record import machine, save
from bench.traces import ideal
from bench.traces.mooncake import Tokens, TraceRequest, read
from bicl.cache.keys import ID_BYTES, PackedIds, pack_ids
from bicl.cache.manager import CacheManager

PAGE_SIZE = 64
VOCAB_SIZE = 128_256
CAPACITIES = (500_000, 900_000, 1_500_000, 5_100_000, 15_400_000, 25_600_000)
"""Tokens. One H200 holds about 0.9 million of an 8B model in bf16 beside its weights."""
RESULT = Path("bench/results/trace-hit-rates.json")


def serve(
    manager: CacheManager, requests: Sequence[TraceRequest], *, replies: bool = True
) -> float:
    """Share of the prompts' tokens that were cached when their request came."""
    tokens = Tokens(VOCAB_SIZE)
    for number, request in enumerate(requests):
        prompt = pack_ids(tokens.prompt(request))
        seq = manager.acquire(prompt)
        assert seq is not None, "one request at a time always finds room"
        manager.copies_issued(seq)
        manager.commit(seq, PackedIds(prompt[ID_BYTES * seq.num_cached_tokens :]))
        if replies:
            reply = tokens.reply(number, request.output_length)
            if manager.extend(seq, request.input_length + len(reply)):
                manager.commit(seq, reply)
        manager.release(seq)
    return manager.stats.hit_tokens / manager.stats.queried_tokens


def gpu_row(requests: Sequence[TraceRequest], tokens: int) -> dict[str, Any]:
    """The GPU tier alone: ours, the bounds, other policies."""
    pages = tokens // PAGE_SIZE
    manager = CacheManager(pages, PAGE_SIZE)
    began = time.perf_counter()
    rate = serve(manager, requests)
    seconds = time.perf_counter() - began
    manager.check_integrity()
    policies = {
        name: ideal.online(requests, pages, PAGE_SIZE, priority)
        for name, priority in ideal.POLICIES.items()
    }
    best = ideal.lru(requests, pages, PAGE_SIZE)
    return {
        "case": "hit rate, GPU only",
        "tokens": tokens,
        "value": rate,
        "ideal": best,
        "points_from_ideal": 100 * (best - rate),
        "clairvoyant": ideal.clairvoyant(requests, pages, PAGE_SIZE),
        "infinite": ideal.lru(requests, None, PAGE_SIZE),
        "policies": policies,
        "us_per_request": 1e6 * seconds / len(requests),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--tokens", nargs="*", type=int, default=CAPACITIES)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    rows = []
    for path in options.traces:
        requests = read(path)
        for tokens in options.tokens:
            rows.append({"trace": path.stem, **gpu_row(requests, tokens)})
            print(table_line(rows[-1]), flush=True)
    save(options.out, machine(page_size=PAGE_SIZE), rows)
    return 0


def table_line(row: dict[str, Any]) -> str:
    rates = [row["value"], row["ideal"], row["clairvoyant"], row["infinite"]]
    names = ("ours", "ideal", "clairvoyant", "infinite")
    shown = ", ".join(f"{n} {100 * r:.2f}" for n, r in zip(names, rates, strict=True))
    others = ", ".join(f"{n} {100 * r:.2f}" for n, r in row["policies"].items())
    return f"{row['trace']} {row['case']}, {row['tokens'] / 1e6:g}M tokens: {shown} | {others}"


if __name__ == "__main__":
    sys.exit(main())
