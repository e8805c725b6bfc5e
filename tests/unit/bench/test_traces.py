"""Traces: the public format, tokens made from it, and the bounds that a cache is held against."""

import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.traces import ideal
from bench.traces.generate import PROFILES, PUBLISHED, describe, generate
from bench.traces.ledger import ledger_tiers
from bench.traces.mooncake import Tokens, TraceRequest, read, scale, thin, window, write
from bench.traces.simulate import Held, serve, tiers_row
from bicl.cache.manager import CacheManager
from bicl.cache.policy import POLICIES
from bicl.errors import InvalidInputError

PAGE = 64


def request(hash_ids, length=None, arrival=0.0):
    return TraceRequest(arrival, length or 512 * len(hash_ids), 10, tuple(hash_ids))


def random_trace(seed, count=60):
    """Conversations that branch, grow and come back."""
    rng = random.Random(seed)
    chains, names = [(0,)], iter(range(1, 10_000))
    requests = []
    for number in range(count):
        stem = rng.choice(chains)
        stem = stem[: rng.randrange(len(stem) + 1)]
        chain = stem + tuple(next(names) for _ in range(rng.randrange(1, 4)))
        chains.append(chain)
        length = 512 * len(chain) - rng.choice([0, 0, 1, 70, 511])
        requests.append(request(chain, length, float(number)))
    return requests


def test_a_trace_reads_back_as_it_was_written(tmp_path):
    path = tmp_path / "trace.jsonl"
    requests = generate(PROFILES["conversation"], seed=1)[:200]
    write(requests, path)
    found = read(path)
    assert [r.hash_ids for r in found] == [r.hash_ids for r in requests]
    assert [r.input_length for r in found] == [r.input_length for r in requests]
    assert max(abs(a.arrival - b.arrival) for a, b in zip(found, requests, strict=True)) <= 5e-4


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        '{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}',
        '{"timestamp": 0, "output_length": 1, "hash_ids": [1]}',
    ],
)
def test_a_broken_line_is_named(tmp_path, line):
    path = tmp_path / "trace.jsonl"
    good = {"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}
    path.write_text(json.dumps(good) + "\n" + line + "\n")
    with pytest.raises(InvalidInputError, match="line 2"):
        read(path)


def test_equal_names_are_equal_tokens_and_others_are_not():
    tokens = Tokens(1000, first_id=4)
    a, b = tokens.prompt(request([0, 1, 2], 1300)), tokens.prompt(request([0, 1, 3]))
    assert len(a) == 1300
    assert (a[:1024] == b[:1024]).all()
    assert (a[1024:] != b[1024:1300]).any()
    assert a.min() >= 4
    assert a.max() < 1000
    assert (Tokens(1000, first_id=4).prompt(request([0, 1, 2], 1300)) == a).all()
    assert (Tokens(1000, first_id=4, seed=1).prompt(request([0, 1, 2], 1300)) != a).any()
    assert (tokens.reply(0, 8) != tokens.reply(1, 8)).any()


def test_scaling_keeps_what_is_shared():
    small = scale([request([0, 1, 2], 1300), request([0, 1, 3], 1536)], 64)
    assert [r.input_length for r in small] == [64 + 64 + 34, 192]
    a, b = (Tokens(1000).prompt(r) for r in small)
    assert (a[:128] == b[:128]).all()
    assert (a[128:] != b[128 : len(a)]).any()


def test_thinning_keeps_whole_conversations():
    requests = generate(PROFILES["conversation"], seed=2)
    kept = thin(requests, 0.05)
    assert 0.02 < len(kept) / len(requests) < 0.1
    chosen = {r.hash_ids[:2] for r in kept}
    assert kept == [r for r in requests if r.hash_ids[:2] in chosen]
    assert [r.input_length for r in window(kept, 3000, 10)] == [
        r.input_length for r in kept if r.input_length + r.output_length <= 3000
    ][:10]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(8, 200))
def test_bounds_are_in_order(seed, capacity):
    """More room never hurts LRU; knowing the future is at least as good; infinite is most."""
    requests = random_trace(seed)
    lru = ideal.lru(requests, capacity, PAGE)
    assert lru <= ideal.lru(requests, capacity + 8, PAGE)
    assert lru <= ideal.clairvoyant(requests, capacity, PAGE) + 1e-12
    assert ideal.clairvoyant(requests, capacity, PAGE) <= ideal.lru(requests, None, PAGE) + 1e-12
    assert ideal.online(requests, capacity, PAGE, ideal.POLICIES["lru"]) == pytest.approx(lru)


def test_the_bound_counts_leading_pages_only():
    """Two prompts of three blocks in a store of four: the second evicts the end of the first."""
    requests = [request([1, 2, 3]), request([4, 5, 6]), request([1, 2, 3])]
    per_block = 512 // PAGE
    assert ideal.lru(requests, 4 * per_block, PAGE) == pytest.approx(512 / (9 * 512))
    assert ideal.lru(requests, 6 * per_block, PAGE) == pytest.approx((3 * 512 - 1) / (9 * 512))
    assert ideal.clairvoyant(requests, 4 * per_block, PAGE) == pytest.approx(
        (3 * 512 - 1) / (9 * 512)
    )


def test_our_bookkeeping_reaches_the_infinite_bound():
    requests = random_trace(3)
    manager = CacheManager(20_000, PAGE)
    rate = serve(manager, requests, replies=True)
    assert rate == pytest.approx(ideal.lru(requests, None, PAGE), abs=0.002)


@pytest.mark.parametrize("profile", PROFILES)
def test_made_traces_resemble_the_published_ones(profile):
    made, published = describe(generate(PROFILES[profile])), PUBLISHED[profile]
    for name in ("requests", "prompt mean", "prompt p50", "prompt p90", "hit rate, infinite"):
        assert np.isclose(made[name], published[name], rtol=0.2), name


def test_all_tiers_together_reach_the_bound_of_the_largest():
    row = tiers_row(random_trace(5, 150), Held(16 * 512, 32 * 512, 64 * 512))
    assert row["from_host"] > 0
    assert row["from_disk"] > 0
    assert row["points_from_ideal"] < 2, row
    assert row["ideal"] < row["infinite"]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_tiers_keep_what_the_pool_uses(policy):
    """A prefix that is hit in the pool again and again is asked from the tiers by nobody, and must
    not leave them for that."""
    names = iter(range(1, 10_000))

    def stranger():
        return request([next(names) for _ in range(4)])

    favourite = stranger()
    with ledger_tiers(PAGE, host_pages=16, disk_pages=24, policy=policy) as tiers:
        manager = CacheManager(12, PAGE, tiers=tiers, eviction_policy="lru")
        for _ in range(10):
            traffic = scale([favourite, stranger()], PAGE)
            serve(manager, traffic, tiers=tiers, replies=False)
        assert manager.stats.host_hit_tokens + manager.stats.disk_hit_tokens == 0
        serve(manager, scale([stranger() for _ in range(4)], PAGE), tiers=tiers, replies=False)
        serve(manager, scale([favourite], PAGE), tiers=tiers, replies=False)
        assert manager.stats.host_hit_tokens + manager.stats.disk_hit_tokens >= 3 * PAGE
