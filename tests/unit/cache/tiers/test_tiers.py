"""Pages leave the pool for host memory and disk, and come back as they were, or not at all."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from support.tier_rig import (
    LAYERS,
    MEBI,
    PAGE,
    PAGE_BYTES,
    blocked,
    chain,
)

from bicl.cache.keys import PageChain
from bicl.cache.tiers import Done, saves
from bicl.errors import CapacityError, ConfigError, TransferError


def test_pages_come_back_as_they_were(rig) -> None:
    one = rig()
    prompt = chain(5 * PAGE)
    held = one.save(prompt, [3, 1, 4, 5, 9])
    assert one.fetch(prompt, [2, 6, 10, 11, 12]) == 5
    assert one.holds([2, 6, 10, 11, 12], held)
    stats = one.tiers.stats()
    assert (stats.saved_pages, stats.loaded_pages, stats.host_pages) == (5, 5, 5)
    assert stats.saved_bytes == stats.loaded_bytes == 5 * PAGE_BYTES


def test_another_tenant_adapter_or_prompt_finds_nothing(rig) -> None:
    """(A11, A16, A17)"""
    one = rig()
    one.save(chain(3 * PAGE, salt="a"), [0, 1, 2])
    assert one.tiers.num_in_host(chain(3 * PAGE, salt="a"), 0, 3) == 3
    for other in ({"salt": "b"}, {}, {"salt": "a", "group": "lora"}, {"salt": "a", "seed": 1}):
        assert one.tiers.num_in_host(chain(3 * PAGE, **other), 0, 3) == 0


def test_equal_keys_with_other_tokens_are_no_hit(rig) -> None:
    """A hash that always says the same. (A13)"""
    one = rig()

    def constant(data: bytes) -> bytes:
        return bytes(32)

    first = PageChain([1] * PAGE, PAGE, [bytes(32)], hash_function=constant)
    second = PageChain([2] * PAGE, PAGE, [bytes(32)], hash_function=constant)
    one.save(first, [0])
    assert one.tiers.num_in_host(first, 0, 1) == 1
    assert one.tiers.num_in_host(second, 0, 1) == 0


def test_hit_ends_at_the_first_gap(rig) -> None:
    one = rig()
    prompt = chain(6 * PAGE)
    one.fill([0, 1, 4, 5])
    one.tiers.save(prompt, [0, 1])
    one.tiers.save(prompt, [4, 5], first=4)
    assert one.tiers.settle(10)
    assert one.tiers.num_in_host(prompt, 0, 6) == 2
    assert one.tiers.num_in_host(prompt, 4, 6) == 2


def test_least_recently_used_chain_leaves_first_and_its_end_before_its_beginning(rig) -> None:
    """Room for eight pages: two chains of three, the older one used since, then one more."""
    now = [0.0]
    one = rig(host_bytes=8 * PAGE_BYTES, clock=lambda: now[0])
    older, newer, third = (chain(3 * PAGE, seed=seed) for seed in (1, 2, 3))
    one.save(older, [0, 1, 2])
    one.save(newer, [3, 4, 5])
    now[0] = 5.0
    one.tiers.reserve(older, 0, 3).drop()
    now[0] = 12.5
    one.save(third, [6, 7, 8])
    assert [one.tiers.num_in_host(c, 0, 3) for c in (older, newer, third)] == [3, 2, 3]
    stats = one.tiers.stats()
    assert (stats.host_evicted_pages, stats.host_evicted_seconds) == (1, 12.5)


def test_use_in_the_pool_keeps_pages_in_host_memory(rig) -> None:
    one = rig(host_bytes=4 * PAGE_BYTES)
    first, second = chain(2 * PAGE, seed=1), chain(2 * PAGE, seed=2)
    one.save(first, [0, 1])
    one.save(second, [2, 3])
    one.tiers.touch([first.key(0), first.key(1)])
    one.save(chain(2 * PAGE, seed=3), [4, 5])
    assert one.tiers.num_in_host(first, 0, 2) == 2
    assert one.tiers.num_in_host(second, 0, 2) == 0


def test_pages_being_read_are_not_evicted(rig) -> None:
    one = rig(host_bytes=4 * PAGE_BYTES)
    held = one.save(chain(4 * PAGE), [0, 1, 2, 3])
    reservation = one.tiers.reserve(chain(4 * PAGE), 0, 4)
    one.save(chain(4 * PAGE, seed=1), [4, 5, 6, 7])
    assert one.tiers.stats().dropped_saves == 4
    fetch = reservation.start([8, 9, 10, 11])
    fetch.join_all(LAYERS)
    assert one.holds([8, 9, 10, 11], held)


def test_first_layer_is_there_before_the_last(rig, monkeypatch) -> None:
    one = rig()
    held = one.save(chain(2 * PAGE), [0, 1])
    release = blocked(one, monkeypatch, "load", layer=1)
    fetch = one.tiers.reserve(chain(2 * PAGE), 0, 2).start([4, 5])
    fetch.join(0)
    assert torch.equal(one.layers[0][[4, 5]], held[0])
    assert not fetch.settled
    release.set()
    fetch.join(2)
    assert one.holds([4, 5], held)


def test_cancelled_fetch_settles_when_its_copy_ends_and_says_so(rig, monkeypatch) -> None:
    """(A33)"""
    settled = threading.Event()
    one = rig(on_change=settled.set)
    one.save(chain(2 * PAGE), [0, 1])
    release = blocked(one, monkeypatch, "load", layer=1)
    fetch = one.tiers.reserve(chain(2 * PAGE), 0, 2).start([4, 5])
    fetch.join(0)
    fetch.cancel()
    assert not fetch.wait(0.05)
    with pytest.raises(TransferError):
        fetch.join(1)
    release.set()
    assert fetch.wait(10)
    assert settled.wait(10)
    assert torch.isnan(one.layers[2][[4, 5]]).all()  # the last layer's copy never began
    assert one.tiers.stats().cancelled_fetches == 1
    assert one.tiers.num_in_host(chain(2 * PAGE), 0, 2) == 2


@pytest.mark.parametrize("layer", range(LAYERS))
def test_failed_copy_is_reported_once_and_its_blocks_are_forgotten(rig, monkeypatch, layer) -> None:
    one = rig()
    one.save(chain(2 * PAGE), [0, 1])
    load = one.mover.load

    def fails(number, *rest):
        if number == layer:
            raise OSError("bus error")
        return load(number, *rest)

    monkeypatch.setattr(one.mover, "load", fails)
    fetch = one.tiers.reserve(chain(2 * PAGE), 0, 2).start([4, 5])
    with pytest.raises(TransferError):
        fetch.join_all(LAYERS)
    assert fetch.wait(10)
    assert fetch.failed
    assert one.tiers.stats().failures["copy"] == 1
    assert one.tiers.num_in_host(chain(2 * PAGE), 0, 2) == 0


def test_stale_slot_is_not_read(rig) -> None:
    """A slot that holds another block than the index says."""
    one = rig()
    one.save(chain(2 * PAGE), [0, 1])
    reservation = one.tiers.reserve(chain(2 * PAGE), 0, 2)
    one.tiers._host.tags.write([reservation.blocks[1].place], [b"another"])
    fetch = reservation.start([4, 5])
    with pytest.raises(TransferError):
        fetch.join(0)
    assert fetch.wait(10)
    assert one.tiers.stats().failures["stale"] == 1
    assert torch.isnan(one.layers[0][[4, 5]]).all()


def test_page_that_is_claimed_before_its_copy_begins_is_not_saved(rig, monkeypatch) -> None:
    one = rig()
    first, second = chain(PAGE, seed=1), chain(2 * PAGE, seed=2)
    one.fill([0, 1, 2])
    release = blocked(one, monkeypatch, "save")
    one.tiers.save(first, [0])
    one.tiers.save(second, [1, 2])
    one.tiers.claim([2, 7])
    one.layers[0][2] = torch.nan
    release.set()
    assert one.tiers.settle(10)
    assert one.tiers.num_in_host(first, 0, 1) == 1
    assert one.tiers.num_in_host(second, 0, 2) == 1
    assert one.tiers.stats().dropped_saves == 1


def test_claim_waits_for_the_copy_that_reads_the_page(rig, monkeypatch) -> None:
    one = rig()
    held = one.fill([0])
    entered, original = threading.Event(), one.mover.save

    def slow(*arguments):
        entered.set()
        threading.Event().wait(0.05)
        return original(*arguments)

    monkeypatch.setattr(one.mover, "save", slow)
    one.tiers.save(chain(PAGE), [0])
    assert entered.wait(10)
    one.tiers.claim([0])
    for layer in one.layers:
        layer[0] = torch.nan
    assert one.tiers.settle(10)
    assert one.fetch(chain(PAGE), [5]) == 1
    assert one.holds([5], held)


def test_close_waits_for_the_copies_that_a_claim_began(rig, monkeypatch) -> None:
    one = rig()
    one.fill([0, 1])
    began, may_end, ended, original = threading.Event(), threading.Event(), [], one.mover.save

    class Slow(Done):
        def wait(self) -> None:
            assert may_end.wait(10)
            ended.append(self)

    def save(*arguments) -> Slow:
        original(*arguments)
        began.set()
        return Slow()

    monkeypatch.setattr(one.mover, "save", save)
    one.tiers.save(chain(PAGE, seed=1), [0])
    assert began.wait(10)
    one.tiers.save(chain(PAGE, seed=2), [1])
    one.tiers.claim([1], finish=True)
    closing = threading.Thread(target=one.tiers.close, args=(0.01,))
    closing.start()
    closing.join(0.1)
    assert not ended
    may_end.set()
    closing.join(10)
    assert len(ended) == 2


def test_flush_forgets_what_is_held_and_what_is_under_way(rig, tmp_path, monkeypatch) -> None:
    """(A18)"""
    one = rig(disk_folder=tmp_path, disk_bytes=MEBI)
    one.save(chain(2 * PAGE, seed=1), [0, 1])
    entered, release, original = threading.Event(), threading.Event(), one.mover.save

    def waits(*arguments):
        entered.set()
        assert release.wait(20)
        return original(*arguments)

    monkeypatch.setattr(one.mover, "save", waits)
    one.fill([2, 3, 4])
    one.tiers.save(chain(2 * PAGE, seed=2), [2, 3])
    assert entered.wait(10)
    one.tiers.save(chain(PAGE, seed=3), [4])
    assert one.tiers.flush() == 4
    release.set()
    assert one.tiers.settle(10)
    for seed in (1, 2, 3):
        assert one.tiers.num_in_host(chain(2 * PAGE, seed=seed), 0, 2) == 0
    one.tiers.close()
    assert not list(tmp_path.rglob("*.page"))


def test_flush_of_one_adapter_leaves_the_others(rig, tmp_path) -> None:
    """(A12)"""
    one = rig(disk_folder=tmp_path, disk_bytes=MEBI)
    one.save(chain(PAGE, group="x"), [0])
    one.save(chain(PAGE, group="y"), [1])
    assert one.tiers.flush("x") == 2  # in both tiers
    one.tiers._disk._store._deletion.join()
    assert one.tiers.num_in_host(chain(PAGE, group="x"), 0, 1) == 0
    assert one.tiers.num_in_host(chain(PAGE, group="y"), 0, 1) == 1
    assert len(list(tmp_path.rglob("*.page"))) == 1


def test_sizes_that_hold_nothing_are_refused(rig, tmp_path) -> None:
    with pytest.raises(ConfigError, match=f"needs {PAGE_BYTES}"):
        rig(host_bytes=PAGE_BYTES - 1)
    with pytest.raises(ConfigError, match="one page needs"):
        rig(disk_folder=tmp_path, disk_bytes=100)


def test_measured_rate_decides_what_is_fetched(rig) -> None:
    one = rig()
    one.tiers.measure(range(8))
    costs = one.tiers.costs
    assert costs.host_bytes_per_second > 0
    costs.overhead_seconds, costs.host_bytes_per_second = 0.001, PAGE_BYTES / 0.001
    costs.prefill_tokens_per_second = PAGE / 0.002  # two milliseconds a page; a copy takes one
    assert not one.tiers.fetch_pays(1)
    assert one.tiers.fetch_pays(2)
    assert one.tiers.stats().skipped_fetches == 1
    costs.prefill_tokens_per_second = PAGE / 0.0005
    assert not one.tiers.fetch_pays(10_000)


def test_flush_lets_a_fetch_under_way_finish(rig, monkeypatch) -> None:
    """Live requests go on undisturbed; nobody else finds the pages."""
    one = rig()
    held = one.save(chain(2 * PAGE), [0, 1])
    release = blocked(one, monkeypatch, "load", layer=1)
    fetch = one.tiers.reserve(chain(2 * PAGE), 0, 2).start([4, 5])
    fetch.join(0)
    assert one.tiers.flush() == 2
    release.set()
    fetch.join_all(LAYERS)
    assert one.holds([4, 5], held)
    assert one.tiers.settle(10)
    assert one.tiers.num_in_host(chain(2 * PAGE), 0, 2) == 0


def test_pinned_pages_stay_for_their_time(rig) -> None:
    now = [0.0]
    one = rig(host_bytes=8 * PAGE_BYTES, clock=lambda: now[0])
    pinned = chain(3 * PAGE, seed=1)
    one.save(pinned, [0, 1, 2])
    assert one.tiers.pin(pinned, 0, 3, 10.0) == 3
    one.save(chain(3 * PAGE, seed=2), [3, 4, 5])
    with pytest.raises(CapacityError, match="at most 4"):
        one.tiers.pin(chain(3 * PAGE, seed=2), 0, 3, 10.0)
    for seed in range(3, 6):
        one.save(chain(4 * PAGE, seed=seed), [6, 7, 8, 9])
    assert one.tiers.num_in_host(pinned, 0, 3) == 3
    now[0] = 11.0
    for seed in range(6, 8):
        one.save(chain(4 * PAGE, seed=seed), [6, 7, 8, 9])
    assert one.tiers.num_in_host(pinned, 0, 3) == 0


def test_page_that_is_saved_again_before_its_copy_began_keeps_the_newer_name(
    rig, monkeypatch
) -> None:
    one = rig()
    one.fill([0])
    release = blocked(one, monkeypatch, "save")
    one.tiers.save(chain(PAGE, seed=1), [0])
    while one.tiers._saves._waiting:  # until the copy of page 0 began, on its own
        time.sleep(0.001)
    one.fill([1])
    one.tiers.save(chain(PAGE, seed=2), [1])
    held = one.fill([1], seed=9)
    one.tiers.save(chain(PAGE, seed=3), [1])
    release.set()
    assert one.tiers.settle(10)
    assert one.tiers.num_in_host(chain(PAGE, seed=2), 0, 1) == 0
    assert one.fetch(chain(PAGE, seed=3), [5]) == 1
    assert one.holds([5], held)


def test_pages_of_one_step_are_saved_in_one_copy(rig, monkeypatch) -> None:
    monkeypatch.setattr(saves, "LINGER_SECONDS", 0.3)
    one = rig()
    copies: list[list[int]] = []
    save = one.tiers.mover.save

    def counted(pages, *rest):
        copies.append(list(pages))
        return save(pages, *rest)

    monkeypatch.setattr(one.tiers.mover, "save", counted)
    one.fill([0, 1, 2, 3])
    one.tiers.save(chain(PAGE, seed=1), [0])
    one.tiers.save(chain(3 * PAGE, seed=2), [1, 2, 3])
    one.tiers.claim([2])  # overwritten meanwhile
    assert one.tiers.settle(10)
    assert copies == [[0, 1, 3]]
