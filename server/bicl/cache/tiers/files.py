"""What the disk tier does with files and folders."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

from bicl.errors import ConfigError

__all__ = [
    "delete_folders",
    "files_below",
    "in_memory",
    "locked",
    "read_file",
    "size_below",
    "write_file",
]


def locked(path: Path) -> TextIO:
    """The file, open and locked until it is closed.

    Raises:
        ConfigError: another process has it.
    """
    file = path.open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError(
            f"another server uses {path.parent} for the same model; give each its own folder"
        ) from None
    return file


def files_below(folder: Path) -> Iterator[os.DirEntry[str]]:
    """All files in a folder and those in it."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from files_below(Path(entry.path))
            else:
                yield entry


def delete_folders(folders: list[Path]) -> None:
    """As far as that is possible."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def size_below(folder: Path) -> int:
    """Bytes of :func:`files_below`."""
    return sum(file.stat().st_size for file in files_below(folder))


def write_file(path: Path, parts: list[bytes | memoryview], *, drop: bool = False) -> None:
    """A new file. ``drop``: wait until it is on the disk, and ask the kernel to keep no copy."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        for part in parts:
            rest = memoryview(part)
            while rest:
                rest = rest[os.write(file, rest) :]
        if drop:
            os.fdatasync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)


def read_file(path: Path, header_bytes: int, into: memoryview) -> tuple[bytes, int]:
    """A file's header and size; what follows the header goes to ``into``."""
    file = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(file).st_size
        header = bytearray(header_bytes)
        done, wanted = 0, header_bytes + len(into)
        while done < wanted:
            rest = [memoryview(header)[done:], into[max(0, done - header_bytes) :]]
            count = os.preadv(file, rest, done)
            if count == 0:
                return bytes(header[:done]), done
            done += count
        return bytes(header), size
    finally:
        os.close(file)


def in_memory(path: Path, offsets: Iterable[int]) -> bool:
    """Whether the kernel has these bytes of a file in memory. No where it does not tell."""
    flag = getattr(os, "RWF_NOWAIT", None)
    if flag is None:
        return False
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        byte = bytearray(1)
        return all(os.preadv(file, [byte], offset, flag) == 1 for offset in offsets)
    except OSError:  # it would have to wait for the disk
        return False
    finally:
        os.close(file)
