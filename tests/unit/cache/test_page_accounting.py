"""No page is lost, doubled or freed under a reader. Pages of 64 tokens."""

from __future__ import annotations

import random

import pytest
from simulated_pool import Run, SimulatedPool

from bicl.cache.keys import Namespace
from bicl.cache.manager import CacheManager
from bicl.errors import CapacityError

PAGE = 64


def tokens(count: int, start: int = 1000) -> list[int]:
    return list(range(start, start + count))


def all_free(pool: SimulatedPool) -> bool:
    pool.check()
    pool.manager.flush()
    pool.check()
    return pool.manager.gauges().free_pages == pool.manager.usable_pages


def test_two_thousand_requests_without_reuse_leave_nothing_behind() -> None:  # A25
    pool = SimulatedPool(CacheManager(4, PAGE, prefix_cache=False))
    for number in range(2000):
        run = pool.start(tokens(70, start=number))
        pool.step(run, 70, [])
        for _ in range(5):
            assert pool.grow(run, len(run.tokens) + 1)
            pool.step(run, 1, [7])
        pool.finish(run)
        assert pool.manager.gauges().free_pages == 4
    pool.check()


@pytest.mark.parametrize("chunk", [100, 128, 1])
def test_chunks_that_do_not_align_with_pages_lose_none(chunk: int) -> None:  # A21, A26
    pool = SimulatedPool(CacheManager(16, PAGE))
    pool.serve(tokens(192), [])
    others = [pool.start(tokens(65, start=10_000 * i)) for i in (1, 2, 3)]
    run = pool.start(tokens(330), num_tokens=chunk)
    assert run.seq.num_cached_tokens == 192
    while len(run.tokens) < 330:
        assert pool.grow(run, min(len(run.tokens) + chunk, 330))
        pool.step(run, chunk, [])
        for other in others:
            assert pool.grow(other, len(other.tokens) + 1)
            pool.step(other, 1, [7])
        pool.check()
    assert len(run.seq.page_ids) == 6
    for ended in [run, *others]:
        pool.finish(ended)
    assert pool.manager.gauges().in_use_pages == 0
    assert all_free(pool)


def test_chunked_sequence_holds_only_its_chunks() -> None:
    pool = SimulatedPool(CacheManager(16, PAGE))
    run = pool.start(tokens(640), num_tokens=100)
    assert run.seq.capacity_tokens == 128
    assert pool.grow(run, 228)
    assert run.seq.capacity_tokens == 256


def test_requests_that_end_on_their_first_token_free_their_pages() -> None:  # A27
    pool = SimulatedPool(CacheManager(8, PAGE))
    decoding = pool.start(tokens(65, start=50_000))
    for number in range(50):
        run = pool.start(tokens(65, start=100 * number))
        pool.step(run, 65, [])
        pool.step(decoding, 1, [number])
        assert pool.grow(decoding, len(decoding.tokens) + 1)
        pool.finish(run)
        pool.check()
    assert pool.manager.gauges().in_use_pages == len(decoding.seq.page_ids)
    pool.finish(decoding)
    assert all_free(pool)


def test_request_cancelled_while_waiting_gives_its_references_back() -> None:  # A28
    pool = SimulatedPool(CacheManager(8, PAGE))
    first = pool.start(tokens(150))
    pool.step(first, 150, [])
    counts = [pool.manager._allocator.references(page) for page in first.seq.page_ids]
    waiting = pool.start(tokens(130) + [5] * 20)
    assert waiting.seq.num_cached_tokens == 128
    pool.finish(waiting)
    pool.check()
    assert [pool.manager._allocator.references(page) for page in first.seq.page_ids] == counts
    pool.finish(first)
    gauges = pool.manager.gauges()
    assert (gauges.in_use_pages, gauges.cached_pages) == (0, 3)


def test_failed_growth_undoes_only_itself() -> None:  # A29
    pool = SimulatedPool(CacheManager(5, PAGE))
    other = pool.start(tokens(64, start=9000))
    pool.step(other, 64, [])
    run = pool.start(tokens(128))
    held = list(run.seq.page_ids)
    assert not pool.grow(run, 5 * PAGE)
    assert run.seq.page_ids == held
    pool.check()
    pool.finish(other)
    assert pool.grow(run, 5 * PAGE)  # by evicting what the other left
    assert run.seq.page_ids[:2] == held
    pool.check()


def test_failed_admission_evicts_nothing() -> None:  # A29
    pool = SimulatedPool(CacheManager(6, PAGE))
    pool.serve(tokens(128), [])
    running = pool.start(tokens(192, start=9000))
    before = pool.manager.gauges()
    assert pool.start(tokens(256, start=20_000)) is None
    assert pool.start(tokens(128) + tokens(192, start=30_000)) is None
    assert pool.manager.gauges() == before
    pool.check()
    pool.finish(running)
    assert pool.serve(tokens(150), []) == 128


def test_lookup_one_short_of_a_page_leaves_no_empty_node() -> None:  # A22
    pool = SimulatedPool(CacheManager(4, PAGE))
    pool.serve(tokens(64), [])
    assert pool.manager.cached_tokens(tokens(63)) == 62
    pool.serve([*tokens(63), 7], [])
    pool.check()
    pool.serve(tokens(256, start=50_000), [])  # evicts everything
    assert pool.manager.stats.evicted_pages == 2
    assert pool.serve(tokens(256, start=50_000), []) == 192  # a copy has no room
    assert all_free(pool)


def test_counters_hold_at_every_step_of_a_split() -> None:  # A23
    pool = SimulatedPool(CacheManager(8, PAGE))

    def places() -> tuple[int, int, int]:
        pool.check()
        gauges = pool.manager.gauges()
        return gauges.free_pages, gauges.cached_pages, gauges.in_use_pages

    pool.serve(tokens(192), [])
    assert places() == (5, 3, 0)
    b = pool.start(tokens(128) + [7] * 64)
    assert places() == (4, 1, 3)
    a = pool.start(tokens(193))
    assert places() == (3, 0, 5)
    pool.step(b, 64, [])
    assert places() == (3, 0, 5)
    pool.finish(a)
    assert places() == (4, 1, 3)
    pool.finish(b)
    assert places() == (4, 4, 0)


def test_least_recently_used_chain_goes_first_from_its_end() -> None:
    pool = SimulatedPool(CacheManager(6, PAGE, min_copy_tokens=64))
    old, new = tokens(192), tokens(192, start=9000)
    pool.serve(old, [])
    pool.serve(new, [])
    pool.serve(tokens(64, start=50_000), [])
    look = pool.manager.cached_tokens
    assert (look([*old, 1]), look([*new, 1])) == (128, 192)
    pool.serve(old, [])  # one page came back; the new chain is the oldest now
    pool.serve(tokens(64, start=70_000), [])
    assert (look([*old, 1]), look([*new, 1])) == (192, 64)


def test_shared_stem_outlives_its_branches() -> None:
    pool = SimulatedPool(CacheManager(6, PAGE, min_copy_tokens=64))
    for branch in range(30):
        pool.serve([*tokens(128), *([branch] * 128)], [])
        pool.check()
    assert pool.manager.cached_tokens(tokens(129)) == 128


def test_sequence_protects_only_the_prefix_that_it_shares() -> None:
    pool = SimulatedPool(CacheManager(8, PAGE))
    first = pool.start(tokens(320), num_tokens=128)
    pool.step(first, 128, [])
    second = pool.start(tokens(128) + [7] * 64)
    assert pool.grow(first, 320)
    pool.step(first, 192, [])
    pool.finish(first)
    gauges = pool.manager.gauges()
    assert (gauges.in_use_pages, gauges.cached_pages) == (3, 3)
    assert pool.grow(second, 8 * PAGE)
    pool.check()


def test_eviction_age_is_counted() -> None:
    now = [0.0]
    pool = SimulatedPool(CacheManager(2, PAGE, clock=lambda: now[0]))
    pool.serve(tokens(128), [])
    now[0] = 2.5
    pool.serve(tokens(128, start=9000), [])
    assert pool.manager.stats.evicted_pages == 2
    assert pool.manager.stats.evicted_age_ms == 5000


def test_unfinished_page_gives_way_to_the_longer_one_that_covers_it() -> None:
    pool = SimulatedPool(CacheManager(8, PAGE))
    for length in (100, 110, 128, 120):  # the last is covered already
        pool.serve(tokens(length), [])
        pool.check()
        assert pool.manager.gauges().cached_pages == 2


def test_index_is_bounded_by_the_pages() -> None:  # A32
    pool = SimulatedPool(CacheManager(8, PAGE))
    for number in range(500):
        pool.serve([number] * 128, [], Namespace(salt=str(number)))
    index = pool.manager._index
    nodes = [node for root in index.roots.values() for node in root.subtree()]
    assert len(index.roots) <= 8
    assert len(nodes) <= 16
    assert len(list(index.order.candidates())) <= 8
    assert not pool.manager._live


def test_namespaces_that_never_kept_a_page_leave_no_trace() -> None:  # A32
    pool = SimulatedPool(CacheManager(8, PAGE))
    for number in range(100):
        pool.finish(pool.start(tokens(10), Namespace(salt=str(number))))
        pool.manager.cached_tokens(tokens(10), Namespace(salt=str(number)))
    assert not pool.manager._index.roots


def test_kept_prefixes_give_way_to_the_largest_request() -> None:  # A37
    pool = SimulatedPool(CacheManager(65, PAGE, reserved_pages=1))
    for number in range(64):
        pool.serve([number] * 512, [])
    assert pool.manager.gauges().free_pages == 0
    run = pool.start(tokens(64 * PAGE))
    assert run is not None
    assert pool.manager.gauges().in_use_pages == 64
    assert all_free(pool) is False
    pool.finish(run)
    assert all_free(pool)


def test_runs_under_constant_eviction_read_only_their_own_pages() -> None:  # A19
    """Pool of 8 pages, 130-token requests that share 64, up to 4 at a time, 500 rounds."""
    pool = SimulatedPool(CacheManager(8, PAGE))
    rng, served = random.Random(0), 0
    prompts = [[*tokens(64), *([number] * 66)] for number in range(6)]
    while served < 500:
        if len(pool.runs) < 4:
            pool.start(rng.choice(prompts))
        run = rng.choice(pool.runs)
        pool.issue_copies(run)
        pool.step(run, rng.choice([1, 64, 130]), [9])
        if len(run.tokens) > 130 and rng.random() < 0.5:
            pool.finish(run)
            served += 1
        elif not pool.grow(run, min(len(run.tokens) + 1, 3 * PAGE)):
            pool.finish(rng.choice(pool.runs))  # preempted
        pool.check()
    assert pool.manager.stats.evicted_pages > 100
    assert pool.manager.stats.hit_tokens > 64 * 100
    for run in list(pool.runs):
        pool.finish(run)
    assert all_free(pool)


def test_many_clients_on_few_prefixes_leave_no_page_behind() -> None:  # A20
    pool = SimulatedPool(CacheManager(200, PAGE))
    rng = random.Random(1)
    stems = [tokens(rng.randrange(64, 512), start=1000 * number) for number in range(20)]
    waiting: list[Run] = []
    for number in range(3000):
        run = pool.start([*rng.choice(stems), 500_000 + number, *tokens(rng.randrange(20))])
        if run is None:
            pool.finish(waiting.pop(rng.randrange(len(waiting))))
            continue
        pool.issue_copies(run)
        pool.step(run, len(run.prompt), [])
        waiting.append(run)
        if len(waiting) > 30:
            pool.finish(waiting.pop(rng.randrange(len(waiting))))
        if number % 100 == 0:
            pool.check()
    for run in waiting:
        pool.finish(run)
    stats = pool.manager.stats
    assert stats.hit_tokens > 0.8 * stats.queried_tokens
    assert all_free(pool)


def test_request_that_fits_only_without_the_reserved_page_is_refused() -> None:  # A34
    manager = CacheManager(16, PAGE, reserved_pages=1)
    with pytest.raises(CapacityError, match="16 pages"):
        manager.acquire(tokens(1000))
    assert manager.acquire(tokens(10)) is not None
