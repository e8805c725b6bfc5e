"""Host time of prefix lookup, acquire (lookup, lock, allocation), release and commit.

    python -m bench.cache.bench_lookup [--output FILE] [--rounds N] [--page-size P]

Shapes: one long run of pages; the same length as a chain of 16 turns with 63 sibling branches at
each; a full pool, where every acquire is a miss and must evict its whole length. Commit is that of
a cold prompt at once: every page is hashed and indexed. Prompts are packed once, as the engine
does on arrival; packing a list has its own column. Medians, with 20th and 80th percentiles in the
JSON file.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bench.record import machine, save
from bench.traces.ledger import ledger_tiers
from bicl.cache.keys import PackedIds, pack_ids
from bicl.cache.manager import CacheManager

LENGTHS = (1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 50_000)
TURNS, SIBLINGS = 16, 63


def measure(call: Callable[[], object], rounds: int, after: Callable[[object], None]) -> dict:
    """Microseconds of ``call``; ``after`` undoes it untimed."""
    times = []
    gc.disable()
    for number in range(rounds + 3):
        start = time.perf_counter_ns()
        result = call()
        elapsed = time.perf_counter_ns() - start
        after(result)
        if number >= 3:
            times.append(elapsed / 1000)
    gc.enable()
    deciles = statistics.quantiles(times, n=10)
    return {"median": statistics.median(times), "p20": deciles[1], "p80": deciles[7]}


def forget_last_lookup(manager: CacheManager) -> None:
    """Each call stands for another request."""
    manager._prefixes._last_match = None


def fill(manager: CacheManager, ids: np.ndarray) -> None:
    seq = manager.acquire(ids)
    assert seq is not None
    if seq.pending_copies:
        manager.copies_issued(seq)
    manager.commit(seq, ids[seq.num_committed_tokens :])
    manager.release(seq)


def one_run(page_size: int, ids: np.ndarray) -> CacheManager:
    manager = CacheManager(2 * len(ids) // page_size + 8, page_size)
    fill(manager, ids)
    return manager


def branched(page_size: int, ids: np.ndarray) -> CacheManager:
    """The prompt grew in turns, and at the end of each turn other conversations went elsewhere."""
    rng = np.random.default_rng(1)
    manager = CacheManager(4 * len(ids) // page_size + TURNS * SIBLINGS + 8, page_size)
    turns = min(TURNS, len(ids) // page_size)
    for turn in range(1, turns + 1):
        stem = ids[: len(ids) * turn // turns // page_size * page_size]
        fill(manager, stem)
        for _ in range(SIBLINGS):
            fill(manager, np.concatenate([stem, rng.integers(0, 50_000, page_size)]))
    fill(manager, ids)
    return manager


def full_pool(page_size: int, ids: np.ndarray) -> CacheManager:
    """Every page holds some other prompt: each miss evicts its whole length."""
    rng = np.random.default_rng(2)
    manager = CacheManager(2 * len(ids) // page_size + 8, page_size)
    while manager.gauges().free_pages >= 2:
        length = min(1_000, manager.gauges().free_pages * page_size)
        fill(manager, rng.integers(50_000, 100_000, length))
    return manager


def row(num_tokens: int, page_size: int, rounds: int) -> dict:
    ids = np.random.default_rng(0).integers(0, 50_000, num_tokens)
    as_list = ids.tolist()
    packed = pack_ids(ids)
    run, tree = one_run(page_size, ids), branched(page_size, ids)
    assert run.cached_tokens(packed) == num_tokens - 1 or num_tokens % page_size < 17

    def lookup(manager: CacheManager) -> dict:
        call = functools.partial(manager.cached_tokens, packed)
        return measure(call, rounds, lambda _: forget_last_lookup(manager))

    def acquire_then_release(manager: CacheManager) -> dict:
        def after(seq: object) -> None:
            manager.release(seq)
            forget_last_lookup(manager)

        return measure(lambda: manager.acquire(packed), rounds, after)

    def release_after_acquire(manager: CacheManager) -> dict:
        held = [manager.acquire(packed)]

        def again(_: object) -> None:
            held[0] = manager.acquire(packed)

        return measure(lambda: manager.release(held[0]), rounds, again)

    return {
        "tokens": num_tokens,
        "lookup_us": lookup(run),
        "lookup_branched_us": lookup(tree),
        "acquire_us": acquire_then_release(run),
        "acquire_branched_us": acquire_then_release(tree),
        "acquire_with_tiers_us": acquire_with_tiers(page_size, ids, packed, rounds),
        "release_us": release_after_acquire(run),
        "miss_evict_us": miss_with_eviction(page_size, num_tokens, ids, min(rounds, 20)),
        "commit_us": commit_of_cold_prompt(page_size, packed, min(rounds, 30)),
        "pack_list_us": measure(lambda: pack_ids(as_list), rounds, lambda _: None),
    }


def acquire_with_tiers(page_size: int, ids: np.ndarray, packed: PackedIds, rounds: int) -> dict:
    """The same hit with a host and a disk tier below the pool that hold the prefix, too."""
    pages = 2 * len(ids) // page_size + 8
    with ledger_tiers(page_size, host_pages=pages, disk_pages=pages) as tiers:
        manager = CacheManager(pages, page_size, tiers=tiers)
        fill(manager, ids)
        assert tiers.settle(60)

        def lookup() -> object:
            return manager.promote(packed), manager.acquire(packed)

        def after(found: object) -> None:
            promotion, seq = found
            assert promotion is None
            manager.release(seq)
            forget_last_lookup(manager)

        return measure(lookup, rounds, after)


def commit_of_cold_prompt(page_size: int, packed: PackedIds, rounds: int) -> dict:
    manager = CacheManager(len(packed) // 8 // page_size + 2, page_size)
    held = [manager.acquire(packed)]

    def again(_: object) -> None:
        manager.release(held[0])
        manager.flush()
        held[0] = manager.acquire(packed)

    return measure(lambda: manager.commit(held[0], packed), rounds, again)


def miss_with_eviction(page_size: int, num_tokens: int, ids: np.ndarray, rounds: int) -> dict:
    manager = full_pool(page_size, ids)
    rng = np.random.default_rng(3)
    prompts = iter(
        [pack_ids(rng.integers(100_000, 150_000, num_tokens)) for _ in range(rounds + 3)]
    )
    current: list[PackedIds] = []

    def call() -> object:
        current[:] = [next(prompts)]
        return manager.acquire(current[0])

    def after(seq: object) -> None:
        manager.commit(seq, current[0])
        manager.release(seq)

    return measure(call, rounds, after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--output", type=Path, default=None)
    args = parser.parse_args()
    rows = [row(length, args.page_size, args.rounds) for length in LENGTHS]
    columns = [name for name in rows[0] if name != "tokens"]
    print("median microseconds, page size", args.page_size)
    print("tokens".rjust(7), *(name.removesuffix("_us").rjust(16) for name in columns))
    for line in rows:
        print(
            f"{line['tokens']:7d}",
            *(f"{line[name]['median']:16.1f}" for name in columns),
        )
    output = args.output or Path(__file__).parents[1] / "results" / "cache_lookup.json"
    save(output, machine(page_size=args.page_size, rounds=args.rounds), rows)


if __name__ == "__main__":
    main()
