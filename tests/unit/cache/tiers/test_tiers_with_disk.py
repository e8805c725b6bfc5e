"""Pages leave host memory for disk and come back, as fast as the disk allows."""

from __future__ import annotations

import sys
import threading

import pytest
from support.tier_rig import (
    LAYERS,
    MEBI,
    PAGE,
    PAGE_BYTES,
    chain,
)

from bicl.cache.tiers.disk_pipe import READERS
from bicl.errors import ConfigError


def test_pages_evicted_from_host_memory_come_back_from_disk(rig, tmp_path) -> None:
    one = rig(host_bytes=8 * PAGE_BYTES, disk_folder=tmp_path, disk_bytes=MEBI)
    first = chain(4 * PAGE, seed=1)
    held = one.save(first, [0, 1, 2, 3])
    for seed in (2, 3):
        one.save(chain(4 * PAGE, seed=seed), [4, 5, 6, 7])
    assert one.tiers.num_in_host(first, 0, 4) == 0
    one.promote(first)
    reservation = one.tiers.reserve(first, 0, 4)
    assert (reservation.num_pages, reservation.num_from_disk) == (4, 4)
    reservation.start([8, 9, 10, 11]).join_all(LAYERS)
    assert one.holds([8, 9, 10, 11], held)
    assert one.tiers.reserve(first, 0, 4).num_from_disk == 0  # from now on it is in host memory


def test_promotion_reads_only_what_host_memory_lacks(rig, tmp_path) -> None:
    one = rig(disk_folder=tmp_path, disk_bytes=MEBI)
    prompt = chain(4 * PAGE)
    one.save(prompt, [0, 1, 2, 3])
    for page in (1, 3):
        one.tiers._host.remove(one.tiers._host.get(prompt.key(page)))
    one.promote(prompt)
    assert one.tiers.stats().disk_read_pages == 2
    assert one.tiers.num_in_host(prompt, 0, 4) == 4


def test_closed_promotion_starts_no_further_reads(rig, tmp_path, monkeypatch) -> None:
    one = rig(disk_folder=tmp_path, disk_bytes=MEBI)
    prompt = chain(12 * PAGE)
    one.save(prompt, list(range(12)))
    one.tiers._host.flush(None)
    release, store = threading.Event(), one.tiers._disk._store
    read = store.read
    monkeypatch.setattr(store, "read", lambda *a: (release.wait(20), read(*a)))
    promotion = one.tiers.promote(prompt, 0, 12)
    promotion.close()
    release.set()
    assert promotion.wait(10)
    assert one.tiers.stats().disk_read_pages <= READERS  # those that had begun


def test_disk_that_falls_behind_loses_pages_and_holds_nobody_up(rig, tmp_path, monkeypatch) -> None:
    one = rig(host_bytes=8 * PAGE_BYTES, disk_folder=tmp_path, disk_bytes=MEBI)
    release, store = threading.Event(), one.tiers._disk._store
    write = store.write
    monkeypatch.setattr(store, "write", lambda *a: (release.wait(20), write(*a))[1])
    for seed in range(5):
        one.fill([0, 1])
        one.tiers.save(chain(2 * PAGE, seed=seed), [0, 1])
        with one.tiers._changed:
            assert one.tiers._changed.wait_for(lambda: one.tiers._saves.idle, 10)
    release.set()
    assert one.tiers.settle(10)
    stats = one.tiers.stats()
    assert stats.saved_pages == 10
    assert stats.disk_dropped_pages == 10 - stats.disk_written_pages > 0


def test_full_disk_is_counted_and_nothing_is_left_behind(rig, tmp_path, monkeypatch) -> None:
    one = rig(disk_folder=tmp_path, disk_bytes=MEBI)

    def refuses(path, parts):
        path.write_bytes(b"half a pa")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("bicl.cache.tiers.disk.write_file", refuses)
    one.save(chain(2 * PAGE), [0, 1])
    stats = one.tiers.stats()
    assert (stats.failures["io"], stats.disk_dropped_pages, stats.disk_pages) == (2, 2, 0)
    assert not list(tmp_path.rglob("*.tmp"))
    assert one.fetch(chain(2 * PAGE), [4, 5]) == 2


def test_disk_is_measured_and_left_as_it_was(rig, tmp_path) -> None:
    one = rig(disk_folder=tmp_path, disk_bytes=MEBI)
    saved = one.save(chain(2 * PAGE), [0, 1])
    before = sorted(tmp_path.rglob("*"))
    one.tiers.measure([6, 7])
    assert one.tiers.costs.disk_bytes_per_second > 0
    assert one.tiers.costs.cached_bytes_per_second > 0
    assert sorted(tmp_path.rglob("*")) == before
    assert one.fetch(chain(2 * PAGE), [4, 5]) == 2
    assert one.holds([4, 5], saved)
    assert one.tiers.check_integrity()


@pytest.fixture
def only_on_disk(monkeypatch) -> None:
    """The kernel has no file in memory."""
    monkeypatch.setattr("bicl.cache.tiers.disk.in_memory", lambda path, offsets: False)


def test_slow_disk_is_left_alone(rig, tmp_path, only_on_disk) -> None:
    """Computing is faster: the request does not wait."""
    one = rig(disk_folder=tmp_path, disk_bytes=MEBI)
    one.save(chain(2 * PAGE), [0, 1])
    with one.tiers._changed:
        one.tiers._host.flush(None)
    costs = one.tiers.costs
    costs.disk_bytes_per_second, costs.prefill_tokens_per_second = PAGE_BYTES / 1.0, PAGE / 0.5
    assert one.tiers.promote(chain(2 * PAGE), 0, 2) is None
    assert one.tiers.stats().skipped_fetches == 1
    assert one.tiers.settle(10)
    with one.tiers._changed:
        one.tiers._host.flush(None)
    costs.disk_bytes_per_second = PAGE_BYTES / 0.1
    promotion = one.tiers.promote(chain(2 * PAGE), 0, 2)
    assert promotion is not None
    assert promotion.wait(10)
    promotion.close()
    assert one.tiers.num_in_host(chain(2 * PAGE), 0, 2) == 2


def test_disk_that_was_slow_is_tried_again(rig, tmp_path, only_on_disk) -> None:
    """Pages that are computed instead are read for nobody, not too often, and their rate counts."""
    one = rig(disk_folder=tmp_path, disk_bytes=MEBI)
    one.save(chain(12 * PAGE), list(range(12)))
    with one.tiers._changed:
        one.tiers._host.flush(None)
    costs = one.tiers.costs
    slow = costs.disk_bytes_per_second = PAGE_BYTES / 100.0
    costs.prefill_tokens_per_second = PAGE / 50.0

    def is_left() -> bool:
        promotion = one.tiers.promote(chain(12 * PAGE), 0, 12)
        assert one.tiers.settle(10)
        return promotion is None

    assert is_left()
    assert one.tiers.num_in_host(chain(12 * PAGE), 0, 12) == READERS
    assert costs.disk_bytes_per_second > slow
    costs.disk_bytes_per_second = slow
    assert is_left()
    stats = one.tiers.stats()
    assert (stats.skipped_fetches, stats.disk_read_pages) == (2, READERS)


@pytest.mark.parametrize("away", [None, 0, 2, 4])
def test_files_that_the_kernel_has_in_memory_come_from_a_slow_disk(
    rig, tmp_path, monkeypatch, away: int | None
) -> None:
    """Only if all that is looked at are there: the first, a middle one and the last."""
    one = rig(disk_folder=tmp_path, disk_bytes=MEBI)
    prompt = chain(5 * PAGE)
    held = one.save(prompt, list(range(5)))
    with one.tiers._changed:
        one.tiers._host.flush(None)
    asked = []

    def in_memory(path, offsets) -> bool:
        asked.append(tuple(offsets))
        return away is None or not path.name.startswith(prompt.key(away).hex())

    monkeypatch.setattr("bicl.cache.tiers.disk.in_memory", in_memory)
    costs = one.tiers.costs
    costs.prefill_tokens_per_second = PAGE / 0.5
    costs.disk_bytes_per_second = PAGE_BYTES / 100.0
    costs.cached_bytes_per_second = PAGE_BYTES / 0.001
    promotion = one.tiers.promote(prompt, 0, 5)
    assert (promotion is None) == (away is not None)
    assert set(asked) == {(0, one.tiers._disk._store.file_bytes - 1)}
    if promotion is not None:
        assert promotion.wait(10)
        promotion.close()
        assert costs.disk_bytes_per_second == PAGE_BYTES / 100.0  # nothing came from the disk
        assert one.fetch(prompt, [8, 9, 10, 11, 12]) == 5
        assert one.holds([8, 9, 10, 11, 12], held)


def test_disk_that_cannot_be_measured_is_tried_all_the_same(rig, tmp_path, monkeypatch) -> None:
    one = rig(disk_folder=tmp_path, disk_bytes=MEBI)

    def refused(page):
        raise OSError("no space left on device")

    monkeypatch.setattr(one.tiers._disk._store, "write_probe", refused)
    one.tiers.measure([6, 7])
    assert one.tiers.costs.disk_bytes_per_second == 0
    assert one.tiers.costs.promotion_pays(1)
    assert one.tiers.check_integrity()


def test_missing_hash_package_is_named(rig, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    for module in ("disk", "disk_pipe"):
        monkeypatch.delitem(sys.modules, f"bicl.cache.tiers.{module}", raising=False)
    with pytest.raises(ConfigError, match="pip install xxhash"):
        rig(disk_folder=tmp_path, disk_bytes=MEBI)
    assert rig()  # host memory needs none
