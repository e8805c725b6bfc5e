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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.record import machine, save
from bench.traces import ideal
from bench.traces.ledger import ledger_tiers
from bench.traces.mooncake import BLOCK_TOKENS, Tokens, TraceRequest, read, scale
from bicl.cache.keys import ID_BYTES, PackedIds, pack_ids
from bicl.cache.manager import CacheManager
from bicl.cache.policy import DEFAULT_POLICY, POLICIES
from bicl.cache.tiers import PageTiers

PAGE_SIZE = 64
VOCAB_SIZE = 128_256
CAPACITIES = (500_000, 900_000, 1_500_000, 5_100_000, 15_400_000, 25_600_000)
"""Tokens. One H200 holds about 0.9 million of an 8B model in bf16 beside its weights."""
RESULT = Path("bench/results/trace-hit-rates.json")


class Held(NamedTuple):
    """Tokens that each tier holds; 0: none."""

    pool: int
    host: int
    disk: int


TIERS = (Held(900_000, 5_100_000, 0), Held(900_000, 5_100_000, 25_600_000))
"""The tiers below hold what those above do, so the largest is the capacity."""


def serve(
    manager: CacheManager,
    requests: Sequence[TraceRequest],
    *,
    tiers: PageTiers | None = None,
    replies: bool = True,
) -> float:
    """Share of the prompts' tokens that were cached when their request came. ``tiers`` are the
    manager's, and have all the time that they need between two requests."""
    tokens = Tokens(VOCAB_SIZE)
    for number, request in enumerate(requests):
        prompt = pack_ids(tokens.prompt(request))
        promotion = manager.promote(prompt)
        if promotion is not None:
            promotion.wait()
        seq = manager.acquire(prompt)
        assert seq is not None, "one request at a time always finds room"
        if promotion is not None:
            promotion.close()
        if seq.fetch is not None:
            seq.fetch.wait()
            manager.fetched(seq)
        manager.copies_issued(seq)
        manager.commit(seq, PackedIds(prompt[ID_BYTES * seq.num_cached_tokens :]))
        if replies:
            reply = tokens.reply(number, request.output_length)
            if manager.extend(seq, request.input_length + len(reply)):
                manager.commit(seq, reply)
        manager.release(seq)
        if tiers is not None:
            tiers.settle()
    return manager.stats.hit_tokens / manager.stats.queried_tokens


def gpu_row(requests: Sequence[TraceRequest], tokens: int) -> dict[str, Any]:
    """The GPU tier alone: our policies, the bounds, other policies simulated."""
    pages = tokens // PAGE_SIZE
    ours, microseconds = {}, {}
    for policy in POLICIES:
        manager = CacheManager(pages, PAGE_SIZE, eviction_policy=policy)
        began = time.perf_counter()
        ours[policy] = serve(manager, requests)
        microseconds[policy] = round(1e6 * (time.perf_counter() - began) / len(requests))
        manager.check_integrity()
    rate = ours.pop(DEFAULT_POLICY)
    blocks = tokens // BLOCK_TOKENS  # coarse is enough where only the difference counts
    simulated = {
        name: ideal.online(requests, blocks, BLOCK_TOKENS, priority)
        for name, priority in ideal.POLICIES.items()
    }
    best = ideal.lru(requests, pages, PAGE_SIZE)
    return {
        "case": "hit rate, GPU only",
        "tokens": tokens,
        "policy": DEFAULT_POLICY,
        "value": rate,
        "policies": ours,
        "ideal": best,
        "points_from_ideal": 100 * (best - rate),
        "clairvoyant": ideal.clairvoyant(requests, blocks, BLOCK_TOKENS),
        "infinite": ideal.lru(requests, None, PAGE_SIZE),
        "simulated": simulated,
        "us_per_request": microseconds,
    }


def tiers_row(
    requests: Sequence[TraceRequest], held: Held, policy: str = DEFAULT_POLICY
) -> dict[str, Any]:
    """Pool, host and disk. Every page of the trace's blocks is one page here, and what is held is
    divided alike, which keeps files on the disk down to hundreds of thousands."""
    small = scale(requests, PAGE_SIZE)
    pool, host, disk = (tokens // BLOCK_TOKENS for tokens in held)
    with ledger_tiers(PAGE_SIZE, host_pages=host, disk_pages=disk, policy=policy) as tiers:
        manager = CacheManager(pool, PAGE_SIZE, tiers=tiers, eviction_policy=policy)
        rate = serve(manager, small, tiers=tiers)
        manager.check_integrity()
        assert tiers.check_integrity()
    stats, pages = manager.stats, max(pool, host, disk)
    best = ideal.lru(small, pages, PAGE_SIZE)
    return {
        "case": "hit rate, GPU + host + disk" if disk else "hit rate, GPU + host",
        "tokens": max(held),
        "tokens_held": held._asdict(),
        "policy": policy,
        "value": rate,
        "from_host": stats.host_hit_tokens / stats.queried_tokens,
        "from_disk": stats.disk_hit_tokens / stats.queried_tokens,
        "ideal": best,
        "points_from_ideal": 100 * (best - rate),
        "ideal_of_sum": ideal.lru(small, pool + host + disk, PAGE_SIZE),
        "clairvoyant": ideal.clairvoyant(small, pages, PAGE_SIZE),
        "infinite": ideal.lru(small, None, PAGE_SIZE),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--tokens", nargs="*", type=int, default=CAPACITIES)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for path in options.traces:
        requests = read(path)
        for row in _rows(requests, options.tokens):
            rows.append({"trace": path.stem, **row})
            print(_line(rows[-1]), flush=True)
            save(options.out, machine(page_size=PAGE_SIZE), rows)
    return 0


def _rows(requests: Sequence[TraceRequest], capacities: Sequence[int]) -> Iterator[dict[str, Any]]:
    for tokens in capacities:
        yield gpu_row(requests, tokens)
    for held in TIERS:
        row = tiers_row(requests, held)
        if not held.disk:  # what other policies of ours would hit
            others = [name for name in POLICIES if name != row["policy"]]
            row["policies"] = {name: tiers_row(requests, held, name)["value"] for name in others}
        yield row


def _line(row: dict[str, Any]) -> str:
    names = {"value": "ours", "ideal": "ideal", "ideal_of_sum": "ideal of the sum",
             "from_host": "from host", "from_disk": "from disk",
             "clairvoyant": "clairvoyant", "infinite": "infinite"}  # fmt: skip
    shown = [f"{shown} {100 * row[name]:.2f}" for name, shown in names.items() if name in row]
    shown += [f"{name} {100 * rate:.2f}" for name, rate in row.get("policies", {}).items()]
    return f"{row['trace']}, {row['case']}, {row['tokens'] / 1e6:g}M tokens: {', '.join(shown)}"


if __name__ == "__main__":
    sys.exit(main())
