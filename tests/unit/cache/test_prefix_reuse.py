"""What is found cached, by whom, and what a copy brings. Pages of 64 tokens."""

from __future__ import annotations

import numpy as np
import pytest
from simulated_pool import SimulatedPool

from bicl.cache.keys import Namespace, chain_key, pack_ids, root_key
from bicl.cache.manager import BASE, CacheManager
from bicl.errors import CapacityError, ConfigError, InvalidInputError

PAGE = 64


def tokens(count: int, start: int = 1000) -> list[int]:
    return list(range(start, start + count))


@pytest.fixture
def pool() -> SimulatedPool:
    return SimulatedPool(CacheManager(64, PAGE))


@pytest.mark.parametrize(
    ("shared", "cached"), [(63, 63), (64, 64), (127, 127), (128, 128), (130, 128), (144, 144)]
)
def test_shared_prefix_is_reused_to_the_token(pool, shared: int, cached: int) -> None:  # A74
    """130 shares only 2 tokens of a third page: less than a copy is worth."""
    pool.serve(tokens(200), [])
    assert pool.serve(tokens(shared) + tokens(60, start=5000), []) == cached


def test_partly_matching_page_is_copied_not_shared(pool) -> None:
    first = pool.start(tokens(200))
    pool.step(first, 200, [])
    second = pool.start(tokens(127) + [7] * 10)
    (copy,) = second.seq.pending_copies
    assert copy == (first.seq.page_ids[1], second.seq.page_ids[1], 63)
    assert second.seq.page_ids[0] == first.seq.page_ids[0]
    pool.issue_copies(second)
    pool.step(second, 10, [])
    pool.check()


def test_best_of_many_siblings_is_copied_from(pool) -> None:
    stem = tokens(64)
    for branch in range(20):
        pool.serve([*stem, *tokens(3 * branch), *([branch] * 64)], [])
    assert pool.serve([*stem, *tokens(50), *([777] * 30)], []) == 64 + 50


@pytest.mark.parametrize("least", [1, 16, 64])
def test_copies_below_the_least_gain_are_not_made(least: int) -> None:
    pool = SimulatedPool(CacheManager(16, PAGE, min_copy_tokens=least))
    pool.serve(tokens(128), [])
    for gain in (1, 15, 16, 63):
        ids = tokens(64 + gain) + [gain] * 5
        assert pool.manager.cached_tokens(ids) == 64 + (gain if gain >= least else 0)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 192])
def test_last_token_is_always_left_to_compute(pool, length: int) -> None:  # A6
    pool.serve(tokens(length), [])
    cached = pool.serve(tokens(length), [])
    assert cached == (length - 1 if (length - 1) % PAGE >= 16 else (length - 1) // PAGE * PAGE)
    assert pool.serve(tokens(max(length, 128) + 64), []) >= length // PAGE * PAGE


def test_unfinished_last_page_of_a_prompt_serves_the_next_one(pool) -> None:
    pool.serve(tokens(100), [])
    assert pool.serve([*tokens(100), 1, 2, 3], []) == 100


def test_answer_is_reused_in_the_next_turn(pool) -> None:  # A75
    answer = tokens(50, start=9000)
    pool.serve(tokens(100), answer)
    assert pool.serve(tokens(100) + answer + tokens(50, start=7000), []) == 150


@pytest.mark.parametrize("page_size", [32, 64])
def test_repeats_of_a_long_prompt_hit_in_units_of_the_page(page_size: int) -> None:  # A10
    pool = SimulatedPool(CacheManager(64, page_size, min_copy_tokens=page_size))
    hits = [pool.serve(tokens(1464), []) for _ in range(4)]
    assert hits == [0] + [1463 // page_size * page_size] * 3


def test_each_adapter_sees_only_its_own_pages(pool) -> None:  # A11
    spaces = [Namespace(adapter_id="A"), Namespace(adapter_id="B"), BASE]
    assert [pool.serve(tokens(130), [], space) for space in spaces] == [0, 0, 0]
    assert [pool.serve(tokens(130), [], space) for space in spaces] == [128, 128, 128]


def test_each_tenant_sees_only_its_own_pages(pool) -> None:  # A16
    a, b = Namespace(salt="a"), Namespace(salt="b")
    assert [pool.serve(tokens(130), [], space) for space in (a, a, b, BASE)] == [0, 128, 0, 0]


def test_colliding_hashes_do_not_mix_prompts() -> None:  # A13
    pool = SimulatedPool(CacheManager(16, PAGE, hash_function=lambda data: b"same"))
    pool.serve(tokens(64), [])
    assert pool.serve(tokens(80, start=5000), []) == 0
    assert pool.serve(tokens(80), [], Namespace(salt="other")) == 0
    assert pool.serve(tokens(80), []) == 64


@pytest.mark.parametrize("shift", [256, 65_536, 2**32])
def test_ids_that_agree_in_their_low_bits_differ(pool, shift: int) -> None:  # A14
    pool.serve(tokens(65), [])
    other = tokens(65)
    other[3] += shift
    assert pool.serve(other, []) == 0


def test_request_without_reuse_computes_all_and_is_reused(pool) -> None:  # A7
    pool.serve(tokens(130), [])
    run = pool.start(tokens(130), reuse=False)
    assert run.seq.num_cached_tokens == 0
    pool.step(run, 130, [])
    pool.check()
    pool.finish(run)
    assert pool.serve(tokens(130), []) == 128


def test_prefix_cache_switched_off_keeps_nothing() -> None:
    pool = SimulatedPool(CacheManager(8, PAGE, prefix_cache=False))
    assert [pool.serve(tokens(130), [5] * 70) for _ in range(3)] == [0, 0, 0]
    assert pool.manager.gauges().free_pages == 8
    assert pool.manager.stats.queried_tokens == 0


def test_full_pages_are_shared_while_their_request_still_runs(pool) -> None:
    first = pool.start(tokens(200))
    assert pool.manager.cached_tokens(tokens(200)) == 0
    pool.step(first, 100, [])
    assert pool.manager.cached_tokens(tokens(200)) == 64
    pool.step(first, 100, [])
    second = pool.start(tokens(200))
    assert second.seq.num_cached_tokens == 192
    assert second.seq.page_ids[:3] == first.seq.page_ids[:3]
    pool.check()


def test_two_that_compute_the_same_page_keep_their_own(pool) -> None:
    first, second = pool.start(tokens(130)), pool.start(tokens(130))
    pages = list(second.seq.page_ids)
    pool.step(first, 130, [])
    pool.step(second, 130, [])
    assert second.seq.page_ids == pages
    assert not set(pages) & set(first.seq.page_ids)
    assert pool.manager.stats.duplicate_pages == 2
    pool.check()
    pool.finish(first)
    pool.finish(second)
    assert pool.manager.gauges().cached_pages == 2  # the second's copies are free again


def test_tokens_after_duplicate_pages_are_still_indexed(pool) -> None:
    first, second = pool.start(tokens(130)), pool.start(tokens(200))
    pool.step(first, 130, [])
    pool.step(second, 200, [])
    pool.check()
    pool.finish(first)
    pool.finish(second)
    assert pool.serve(tokens(200), []) == 192


def test_uncommitted_tokens_are_never_reused(pool) -> None:  # A63
    run = pool.start(tokens(192))
    pool.step(run, 100, [])
    pool.write_rejected(run, 92)
    pool.finish(run)
    assert pool.serve(tokens(192), []) == 100


def test_failed_request_leaves_only_the_pages_of_its_good_steps(pool) -> None:
    run = pool.start(tokens(192))
    pool.step(run, 100, [])
    pool.finish(run, keep=False)
    assert pool.serve(tokens(192), []) == 64


def test_request_ended_before_its_copy_was_issued_leaves_no_half_page(pool) -> None:
    pool.serve(tokens(128), [])
    run = pool.start([*tokens(100), 7, 7])
    assert run.seq.pending_copies
    pool.finish(run)
    pool.check()
    assert pool.manager.gauges().in_use_pages == 0
    assert pool.serve([*tokens(100), 7, 7, 7], []) == 100  # from the first prompt's page again


def test_copy_source_survives_eviction_until_the_copy_is_issued() -> None:  # A19
    pool = SimulatedPool(CacheManager(3, PAGE))
    pool.serve(tokens(100), [])
    run = pool.start([*tokens(90), 7])
    assert not pool.grow(run, 192)
    pool.check()
    pool.issue_copies(run)
    assert pool.grow(run, 192)
    pool.step(run, 91, [])
    pool.check()


def test_source_of_a_pending_copy_stays_although_a_longer_page_covers_it(pool) -> None:
    pool.serve(tokens(100), [])
    waiting = pool.start([*tokens(90), 7])
    pool.serve(tokens(128), [])
    pool.check()
    pool.issue_copies(waiting)
    pool.step(waiting, 1, [])
    pool.check()


def test_copy_is_given_up_where_its_source_is_the_room_that_is_missing() -> None:
    pool = SimulatedPool(CacheManager(2, PAGE))
    pool.serve(tokens(128), [])
    run = pool.start(tokens(100) + [7] * 20)
    assert run.seq.num_cached_tokens == 64
    assert run.seq.pending_copies == ()
    pool.step(run, 120, [])
    pool.check()


def test_key_follows_tokens_namespace_and_revision() -> None:  # A73
    def keys(revision: str, space: Namespace, ids: list[int]) -> list[bytes]:
        pool = SimulatedPool(CacheManager(8, PAGE, model_revision=revision))
        run = pool.start(ids, space)
        pool.step(run, len(ids), [])
        return pool.manager.page_keys(run.seq)

    first = chain_key(root_key(BASE, "r1"), pack_ids(tokens(64)))
    second = chain_key(first, pack_ids(tokens(64, start=1064)))
    assert keys("r1", BASE, tokens(150)) == [first, second]
    others = [
        keys("r2", BASE, tokens(150)),
        keys("r1", Namespace(salt="r1"), tokens(150)),
        keys("r1", Namespace(adapter_id="x"), tokens(150)),
        keys("r1", BASE, [0, *tokens(149)]),
    ]
    assert len({key for chain in [[first, second], *others] for key in chain}) == 10


def test_keys_do_not_depend_on_how_the_chain_was_cut(pool) -> None:
    pool.serve(tokens(64 * 3), [])
    pool.serve(tokens(64) + [5] * 64, [])  # splits the first run
    whole = pool.start(tokens(64 * 3 + 1))
    other = SimulatedPool(CacheManager(8, PAGE))
    run = other.start(tokens(64 * 3))
    for _ in range(192):
        other.step(run, 1, [])
    assert pool.manager.page_keys(whole.seq) == other.manager.page_keys(run.seq)


def test_hit_counters_count_admitted_first_runs_only(pool) -> None:  # A70
    pool.serve(tokens(130), [])
    pool.serve(tokens(130), [])
    stats = pool.manager.stats
    assert (stats.queried_tokens, stats.hit_tokens) == (260, 128)
    pool.start(tokens(130), reuse=False)
    assert pool.manager.cached_tokens(tokens(130)) == 128
    assert (stats.queried_tokens, stats.hit_tokens) == (260, 128)


def test_preempted_request_that_finds_its_own_pages_is_no_hit() -> None:  # A71
    pool = SimulatedPool(CacheManager(6, PAGE))
    for round_ in range(20):
        run = pool.start([round_ * 1000 + i for i in range(200)])
        pool.step(run, 150, [])
        pool.finish(run)  # preempted
        run = pool.start(run.prompt, resumed=True)
        assert run.seq.num_cached_tokens >= 128
        pool.issue_copies(run)
        pool.step(run, 200, [])
        pool.finish(run)
    assert pool.manager.stats.hit_tokens == 0
    assert pool.manager.stats.queried_tokens == 20 * 200


def test_refused_request_is_not_counted_as_queried() -> None:
    pool = SimulatedPool(CacheManager(3, PAGE))
    pool.start(tokens(130))
    assert pool.start(tokens(60, start=5000)) is None
    assert pool.manager.stats.queried_tokens == 130
    assert pool.manager.stats.refusals == 1


def test_arrays_lists_and_packed_ids_are_the_same_prompt(pool) -> None:
    pool.serve(tokens(130), [])
    for form in (np.array(tokens(130)), tuple(tokens(130)), pack_ids(tokens(130))):
        assert pool.manager.cached_tokens(form) == 128


def test_empty_prompt_is_refused(pool) -> None:
    with pytest.raises(InvalidInputError, match="at least one token"):
        pool.manager.acquire([])
    assert pool.manager.cached_tokens([]) == 0


def test_prompt_that_can_never_fit_is_refused_with_both_numbers() -> None:
    manager = CacheManager(4, PAGE, reserved_pages=1)
    with pytest.raises(CapacityError, match=r"193 tokens need 4 pages.*has 3 \(192 tokens\)"):
        manager.acquire(tokens(193))
    seq = manager.acquire(tokens(192))
    with pytest.raises(CapacityError, match="193 tokens"):
        manager.extend(seq, 193)
    assert manager.gauges().in_use_pages == 3


def test_foreign_and_ended_sequences_are_refused(pool) -> None:
    other = CacheManager(4, PAGE)
    seq = other.acquire([1])
    manager = pool.manager
    calls = [
        lambda: manager.extend(seq, 2),
        lambda: manager.commit(seq, [1]),
        lambda: manager.copies_issued(seq),
        lambda: manager.page_keys(seq),
        lambda: manager.release(seq),
    ]
    for call in calls:
        with pytest.raises(InvalidInputError, match="not live"):
            call()
    other.check_integrity()


@pytest.mark.parametrize(
    "options",
    [{"num_pages": 0}, {"page_size": 0}, {"min_copy_tokens": 0}, {"reserved_pages": 4}],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="at least"):
        CacheManager(**{"num_pages": 4, "page_size": PAGE, **options})


def test_lost_blocks_are_told_from_new_ones() -> None:
    """What was computed before and left counts as missed; what is new as neither."""
    pool = SimulatedPool(CacheManager(8, PAGE))
    first, second = [1] * (4 * PAGE + 1), [2] * (6 * PAGE + 1)
    pool.serve(first, [])
    assert (pool.manager.stats.block_hits, pool.manager.stats.block_misses) == (0, 0)
    pool.serve(first, [])
    assert (pool.manager.stats.block_hits, pool.manager.stats.block_misses) == (4, 0)
    pool.serve(second, [])  # drives most of the first out
    held = pool.manager.cached_tokens(first) // PAGE
    assert held < 4
    pool.serve(first, [])
    stats = pool.manager.stats
    assert (stats.block_hits, stats.block_misses) == (4 + held, 4 - held)
    pool.manager.flush()
    pool.serve(first, [])
    assert stats.block_misses == 4 - held


def test_prompt_sought_twice_is_found_as_it_is_by_then() -> None:
    """The index remembers its last answer: only until it changes, and never past the tags."""
    manager = CacheManager(12, 64)
    prompt, other = pack_ids(tokens(300)), pack_ids(tokens(128, start=9000))
    assert manager.cached_tokens(prompt) == 0
    first = manager.acquire(prompt)
    manager.commit(first, prompt)
    assert manager.cached_tokens(prompt) == manager.cached_tokens(prompt) == 256
    manager.release(first)
    assert manager.cached_tokens(prompt) == 299  # its last page, too
    second = manager.acquire(other)  # evicts no more than it needs
    manager.commit(second, other)
    manager.release(second)
    kept = manager.acquire(pack_ids(tokens(380, start=20_000)))
    assert manager.cached_tokens(prompt) == 256  # for which one page had to leave
    manager.release(kept)
    manager.tags.clear_all()
    assert manager.cached_tokens(prompt) == 0
