"""Prefixes that must stay, and prefixes that must go. Pages of 64 tokens."""

from __future__ import annotations

import pytest
from simulated_pool import SimulatedPool

from bicl.cache.keys import Namespace
from bicl.cache.manager import BASE, CacheManager, FlushReport
from bicl.errors import CapacityError, InvalidInputError

PAGE = 64


def tokens(count: int, start: int = 1000) -> list[int]:
    return list(range(start, start + count))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pool(clock: Clock) -> SimulatedPool:
    return SimulatedPool(CacheManager(8, PAGE, clock=clock))


def flood(pool: SimulatedPool) -> None:
    """Use every page that is not protected."""
    for number in range(20):
        pool.serve(tokens(4 * PAGE, start=10_000 * (number + 1)), [])


# --- pins ----------------------------------------------------------------------------------------
def test_pinned_prefix_survives_any_number_of_requests(pool) -> None:
    pool.serve(tokens(150), [])
    assert pool.manager.pin(tokens(150)) == 128  # whole pages
    flood(pool)
    assert pool.serve(tokens(150), []) == 128
    assert pool.manager.gauges().pinned_pages == 2


def test_unpinned_prefix_is_evicted_again(pool) -> None:
    pool.serve(tokens(150), [])
    pool.manager.pin(tokens(150))
    assert pool.manager.unpin(tokens(150)) is True
    assert pool.manager.unpin(tokens(150)) is False
    flood(pool)
    assert pool.manager.cached_tokens(tokens(150)) == 0


def test_pin_ends_with_its_time(pool, clock) -> None:
    pool.serve(tokens(150), [])
    pool.manager.pin(tokens(150), ttl_seconds=10)
    clock.now = 9.9
    assert pool.manager.gauges().pinned_pages == 2
    clock.now = 10.0
    assert pool.manager.gauges().pinned_pages == 0
    assert pool.manager.unpin(tokens(150)) is False
    flood(pool)
    assert pool.manager.cached_tokens(tokens(150)) == 0


def test_pin_again_renews_the_time_and_covers_more(pool, clock) -> None:
    pool.serve(tokens(70), [])
    assert pool.manager.pin(tokens(200), ttl_seconds=10) == 64
    pool.serve(tokens(200), [])
    clock.now = 5
    assert pool.manager.pin(tokens(200), ttl_seconds=10) == 192
    clock.now = 14
    flood(pool)
    assert pool.manager.cached_tokens(tokens(200)) == 192
    clock.now = 15
    assert pool.manager.gauges().pinned_pages == 0


def test_only_what_is_cached_can_be_pinned(pool) -> None:
    assert pool.manager.pin(tokens(150)) == 0
    pool.serve(tokens(63), [])
    assert pool.manager.pin(tokens(63)) == 0  # no whole page
    assert pool.manager.unpin(tokens(63)) is False


def test_pin_belongs_to_one_namespace(pool) -> None:
    tenant = Namespace(salt="tenant")
    pool.serve(tokens(150), [], tenant)
    assert pool.manager.pin(tokens(150)) == 0
    assert pool.manager.pin(tokens(150), tenant) == 128
    assert pool.manager.unpin(tokens(150), BASE) is False


def test_pinned_page_is_in_use_while_a_sequence_holds_it(pool) -> None:
    pool.serve(tokens(128), [])
    pool.manager.pin(tokens(128))
    run = pool.start([*tokens(128), 7])
    gauges = pool.manager.gauges()
    assert (gauges.pinned_pages, gauges.in_use_pages) == (0, 3)
    pool.finish(run)
    assert pool.manager.gauges().pinned_pages == 2


def test_overlapping_pins_count_shared_pages_once(pool) -> None:
    pool.serve(tokens(256), [])
    assert pool.manager.pin(tokens(128)) == 128
    assert pool.manager.pin(tokens(256)) == 256
    assert pool.manager.gauges().pinned_pages == 4
    pool.manager.unpin(tokens(256))
    pool.check()
    assert pool.manager.gauges().pinned_pages == 2


def test_pins_cannot_take_the_whole_pool(pool) -> None:
    pool.serve(tokens(320), [])
    with pytest.raises(CapacityError, match="5 of at most 4"):
        pool.manager.pin(tokens(320))
    assert pool.manager.gauges().pinned_pages == 0
    assert pool.manager.pin(tokens(256)) == 256
    pool.check()


def test_pins_that_are_over_leave_room_for_new_ones(pool, clock) -> None:
    pool.serve(tokens(256), [])
    pool.manager.pin(tokens(256), ttl_seconds=5)
    pool.serve(tokens(128, start=9000), [])
    with pytest.raises(CapacityError):
        pool.manager.pin(tokens(128, start=9000))
    clock.now = 5
    assert pool.manager.pin(tokens(128, start=9000)) == 128


def test_request_that_pins_keep_out_waits_until_they_end(pool, clock) -> None:
    pool.serve(tokens(128), [])
    pool.manager.pin(tokens(128), ttl_seconds=5)
    large = tokens(7 * PAGE, start=9000)
    assert pool.manager.acquire(large) is None
    assert pool.manager.gauges().pinned_pages == 2
    clock.now = 5
    assert pool.manager.acquire(large) is not None


def test_request_that_shares_what_is_pinned_needs_no_room_for_it(pool) -> None:
    pool.serve(tokens(128), [])
    pool.manager.pin(tokens(128))
    assert pool.manager.acquire(tokens(8 * PAGE)) is not None
    pool.check()


@pytest.mark.parametrize("ttl", [0, -1, float("nan")])
def test_time_that_is_not_positive_is_refused(pool, ttl: float) -> None:
    with pytest.raises(InvalidInputError, match="ttl_seconds"):
        pool.manager.pin(tokens(64), ttl_seconds=ttl)


# --- flush ---------------------------------------------------------------------------------------
def test_flush_makes_every_prefix_a_miss(pool) -> None:  # A18
    pool.serve(tokens(192), [])
    assert pool.manager.flush() == FlushReport(freed_pages=3, orphaned_pages=0, dropped_pins=0)
    assert pool.serve(tokens(192), []) == 0
    assert pool.manager.stats.flushed_pages == 3


def test_flush_that_finds_nothing_says_so(pool) -> None:  # A18
    assert pool.manager.flush() == FlushReport(0, 0, 0)


def test_flush_drops_pins(pool) -> None:
    pool.serve(tokens(192), [])
    pool.manager.pin(tokens(192))
    assert pool.manager.flush() == FlushReport(freed_pages=3, orphaned_pages=0, dropped_pins=1)
    assert pool.manager.unpin(tokens(192)) is False
    pool.check()


def test_running_request_goes_on_but_nobody_can_join_it(pool) -> None:  # A18
    run = pool.start(tokens(192))
    pool.step(run, 130, [])
    report = pool.manager.flush()
    assert report == FlushReport(freed_pages=0, orphaned_pages=2, dropped_pins=0)
    pool.step(run, 62, [])
    assert pool.grow(run, 193)
    pool.check()
    assert pool.manager.page_keys(run.seq) == []
    assert pool.manager.cached_tokens(tokens(192)) == 0
    pool.finish(run)
    assert pool.manager.gauges().free_pages == 8
    assert pool.manager.cached_tokens(tokens(192)) == 0


def test_request_after_the_flush_is_reused_beside_the_old_one(pool) -> None:
    old = pool.start(tokens(130))
    pool.step(old, 130, [])
    pool.manager.flush()
    pool.weights[""] = 1
    assert pool.serve(tokens(130), []) == 0
    assert pool.serve(tokens(130), []) == 128
    pool.finish(old)
    pool.check()
    assert pool.serve(tokens(130), []) == 128


def test_copy_that_is_pending_during_a_flush_keeps_its_source(pool) -> None:
    pool.serve(tokens(100), [])
    run = pool.start([*tokens(90), 7])
    pool.manager.flush()
    while pool.start(tokens(64, start=9000)):
        pool.check()
    pool.issue_copies(run)
    pool.check()
    assert pool.start(tokens(64, start=9000)) is not None  # the source is free now


def test_flush_of_one_adapter_leaves_the_others(pool) -> None:  # A12
    x, y = Namespace("a", "x"), Namespace("", "x")
    for space in (x, y, BASE):
        pool.serve(tokens(130), [], space)
    pool.manager.pin(tokens(130), x)
    assert pool.manager.flush(adapter_id="x") == FlushReport(4, 0, 1)
    pool.weights["x"] = 1
    assert [pool.serve(tokens(130), [], space) for space in (x, y, BASE)] == [0, 0, 128]


def test_flush_of_the_base_model_leaves_adapters(pool) -> None:
    pool.serve(tokens(130), [], Namespace(adapter_id="x"))
    pool.serve(tokens(130), [])
    assert pool.manager.flush(adapter_id="").freed_pages == 2
    assert pool.manager.cached_tokens(tokens(130), Namespace(adapter_id="x")) == 128
