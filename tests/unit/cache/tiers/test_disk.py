"""Files of pages: what a restart finds, and what is not believed."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bicl.cache.tiers.disk import HEADER_BYTES, DiskReadError, DiskStore
from bicl.cache.tiers.files import in_memory
from bicl.errors import ConfigError

PAGE_BYTES = 3000
FILE_BYTES = HEADER_BYTES + PAGE_BYTES
IDS = bytes(range(64))


def key(number: int) -> bytes:
    return hashlib.sha256(bytes([number])).digest()


def page(number: int) -> memoryview:
    return memoryview(random.Random(number).randbytes(PAGE_BYTES))


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., DiskStore]]:
    made: list[DiskStore] = []

    def make(**options) -> DiskStore:
        defaults = {"fingerprint": b"m", "page_bytes": PAGE_BYTES, "max_bytes": 100 * FILE_BYTES}
        made.append(DiskStore(tmp_path, **{**defaults, **options}))
        return made[-1]

    yield make
    for store in made:
        store.close()


def write(store: DiskStore, number: int, parent: int = 0, group: str = "") -> bool:
    return store.write(key(number), key(parent), IDS, group, page(number))


def read(store: DiskStore, number: int, ids: bytes = IDS) -> bytes:
    into = bytearray(PAGE_BYTES)
    store.read(key(number), ids, memoryview(into))
    return bytes(into)


def file_of(folder: Path, number: int) -> Path:
    return next(folder.rglob(f"{key(number).hex()}-*.page"))


def test_a_restart_finds_every_page(opened, tmp_path: Path) -> None:
    first = opened()
    for number in range(1, 6):
        assert write(first, number, parent=number - 1)
    assert not write(first, 3)  # there already
    first.close()
    second = opened()
    assert len(second) == 5
    assert all(read(second, number) == page(number) for number in range(1, 6))


@pytest.mark.parametrize(
    ("reason", "damage"),
    [
        ("short", lambda data: data[:-1]),
        ("short", lambda data: data[:HEADER_BYTES]),
        ("short", lambda data: data[:10]),
        ("short", lambda data: b""),
        ("corrupt", lambda data: data[:5000] + bytes([data[5000] ^ 1]) + data[5001:]),
        ("corrupt", lambda data: bytes([data[0] ^ 1]) + data[1:]),
        ("corrupt", lambda data: data + b"x"),
        ("corrupt", lambda data: data[:8] + b"\x09" + data[9:]),
        ("corrupt", lambda data: bytes(len(data))),
    ],
)
def test_damaged_file_is_refused_deleted_and_not_tried_again(
    opened, tmp_path: Path, reason: str, damage
) -> None:
    store = opened()
    write(store, 1)
    path = file_of(tmp_path, 1)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DiskReadError) as error:
        read(store, 1)
    assert error.value.reason == reason
    assert not path.exists()
    assert key(1) not in store
    assert store.num_bytes == 0
    assert write(store, 1)
    assert read(store, 1) == page(1)


def test_every_flipped_bit_of_the_header_that_matters_shows(opened, tmp_path: Path) -> None:
    store = opened()
    for position in range(0, 136 + len(IDS), 3):
        write(store, 1)
        path = file_of(tmp_path, 1)
        data = bytearray(path.read_bytes())
        data[position] ^= 0x10
        path.write_bytes(data)
        with pytest.raises(DiskReadError):
            read(store, 1)


def test_a_file_under_anothers_name_is_foreign(opened, tmp_path: Path) -> None:
    store = opened()
    write(store, 1)
    write(store, 2)
    file_of(tmp_path, 1).write_bytes(file_of(tmp_path, 2).read_bytes())
    with pytest.raises(DiskReadError) as error:
        read(store, 1)
    assert error.value.reason == "foreign"


def test_other_tokens_under_an_equal_key_are_foreign(opened) -> None:
    """(A13)"""
    store = opened()
    write(store, 1)
    with pytest.raises(DiskReadError) as error:
        read(store, 1, ids=bytes(64))
    assert error.value.reason == "foreign"


def test_deleted_file_is_missing(opened, tmp_path: Path) -> None:
    store = opened()
    write(store, 1)
    file_of(tmp_path, 1).unlink()
    with pytest.raises(DiskReadError) as error:
        read(store, 1)
    assert error.value.reason == "missing"


def test_other_weights_or_layouts_see_nothing(opened, tmp_path: Path) -> None:
    """(A18)"""
    write(opened(), 1)
    other = opened(fingerprint=b"n")
    assert len(other) == 0
    write(other, 1)
    assert len(list(tmp_path.rglob("*.page"))) == 2


def test_one_process_a_model_and_folder(opened) -> None:
    opened()
    with pytest.raises(ConfigError, match="another server"):
        opened()
    opened(fingerprint=b"n")


def test_least_recently_used_pages_leave_ends_of_chains_first(opened) -> None:
    store = opened(max_bytes=4 * FILE_BYTES)
    for number in (1, 2):  # a chain of two
        write(store, number, parent=number - 1)
    for number in (11, 12):  # and another
        write(store, number, parent=number - 1 if number > 11 else 0)
    store.touch([key(1), key(2)])
    write(store, 21)
    assert [n for n in (1, 2, 11, 12, 21) if key(n) in store] == [1, 2, 11, 21]
    assert store.evicted_pages == 1
    assert 0 <= store.evicted_seconds < 60
    assert store.num_bytes == 4 * FILE_BYTES


def test_smaller_limit_after_a_restart_deletes_the_oldest(opened, tmp_path: Path) -> None:
    store = opened()
    for number in range(1, 6):
        write(store, number, parent=100 + number)
        os.utime(file_of(tmp_path, number), (number, number))
    store.close()
    store = opened(max_bytes=2 * FILE_BYTES)
    assert [n for n in range(1, 6) if key(n) in store] == [4, 5]


def test_strange_names_are_left_alone(opened, tmp_path: Path) -> None:
    """A ring of two that no chain could make, and what is no page at all."""
    store = opened()
    write(store, 1)
    folder = file_of(tmp_path, 1).parent
    for one, other in ((2, 3), (3, 2)):
        (folder / f"{key(one).hex()}-{key(other).hex()[:16]}.page").write_bytes(bytes(FILE_BYTES))
    (folder / "notes.page").write_text("mine")
    store.close()
    store = opened(max_bytes=FILE_BYTES)
    assert len(store) == 1
    assert (folder / "notes.page").exists()


def test_unused_models_are_deleted_when_they_take_too_much(opened, tmp_path: Path) -> None:
    old, used = opened(fingerprint=b"old"), opened(fingerprint=b"used")
    for store in (old, used):
        for number in range(3):
            write(store, number)
    old.close()
    opened(max_bytes=4 * FILE_BYTES)
    left = {path.parent.parent for path in tmp_path.rglob("*.page")}
    assert left == {used._folder}


def test_groups_are_flushed_apart_and_cannot_leave_the_folder(opened, tmp_path: Path) -> None:
    store = opened()
    for number, group in enumerate(["", "lora", "../../etc", "lora"], 1):
        write(store, number, group=group)
    assert len(list(store._folder.glob("*/*.page"))) == 4
    store.close()
    store = opened()
    assert store.flush("lora") == 2
    store._deletion.join()
    assert len(list(store._folder.glob("*/*.page"))) == 2
    assert [n for n in range(1, 5) if key(n) in store] == [1, 3]
    assert store.flush() == 2


def test_flush_during_a_write_wins(opened, tmp_path: Path, monkeypatch) -> None:
    import bicl.cache.tiers.disk as disk

    store = opened()
    original = disk.write_file

    def flushes_meanwhile(path, parts):
        original(path, parts)
        store.flush()

    monkeypatch.setattr(disk, "write_file", flushes_meanwhile)
    assert not write(store, 1)
    store.close()
    assert [path for path in tmp_path.rglob("*") if path.suffix in (".page", ".tmp")] == []


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_disk import PAGE_BYTES, FILE_BYTES, DiskStore, key, write
store = DiskStore(Path({folder!r}), fingerprint=b"m", page_bytes=PAGE_BYTES,
                  max_bytes=100 * FILE_BYTES)
number = 0
while True:
    number = number % 90 + 1
    store.discard(key(number))
    write(store, number)
    print("written", flush=True)
"""


def test_killed_while_writing_leaves_whole_pages_only(opened, tmp_path: Path) -> None:
    """SIGKILL at any moment; the next process finds no half page and can use the folder."""
    code = KILLED.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    for turn in range(3):
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        time.sleep(0.02 + 0.013 * turn)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        store = opened()
        held = [number for number in range(1, 91) if key(number) in store]
        assert held
        assert all(read(store, number) == page(number) for number in held)
        assert not list(tmp_path.rglob("*.tmp"))
        store.close()


def test_flush_outlives_a_crash_before_its_files_are_deleted(
    opened, tmp_path: Path, monkeypatch
) -> None:
    """(A18)"""
    store = opened()
    write(store, 1)
    monkeypatch.setattr("bicl.cache.tiers.disk.delete_folders", lambda folders: None)
    assert store.flush() == 1
    assert len(list(tmp_path.rglob("*.page"))) == 1  # killed here
    store.close()
    store = opened()
    assert len(store) == 0
    assert not list(tmp_path.rglob("*.page"))


def test_what_the_kernel_has_in_memory_is_what_it_reads_without_waiting(
    tmp_path, monkeypatch
) -> None:
    path = tmp_path / "page"
    path.write_bytes(bytes(100))
    answers: dict[int, int | OSError] = {0: 1, 50: 1, 70: BlockingIOError(), 90: OSError(95, "no")}

    def preadv(file, buffers, offset, flags) -> int:
        assert flags == os.RWF_NOWAIT
        answer = answers[offset]
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(os, "preadv", preadv)
    assert in_memory(path, (0, 50))
    assert not in_memory(path, (0, 70))  # on the disk
    assert not in_memory(path, (90,))  # a file system that does not tell
    assert not in_memory(tmp_path / "none", (0,))
