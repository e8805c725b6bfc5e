"""Pages on a local disk: one file a page, found again after a restart.

``FOLDER/<fingerprint>/<group>/<key>-<parent>.page`` holds a header of 4 KiB and then the page of
all layers as it lies in a host slot. A file appears under its name complete (written aside, then
renamed), and nothing is believed of it: size, key, fingerprint, token ids and checksum are compared
on every read, so that a power cut or a bad sector costs a computation and not an answer.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import shutil
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import xxhash

from bicl.cache.policy import DEFAULT_POLICY, make_policy
from bicl.cache.tiers.files import (
    delete_folders,
    files_below,
    in_memory,
    locked,
    read_file,
    size_below,
    write_file,
)
from bicl.cache.tiers.index import USED_CHAINS, Block, BlockIndex
from bicl.errors import ConfigError

__all__ = ["DiskReadError", "DiskStore"]

FORMAT_VERSION = 1
HEADER_BYTES = 4096
_MAGIC = b"BICLPAGE"
_HEADER = struct.Struct("<8sIIQ32s32s32s16s")
_PARENT_BYTES = 8
_NOBODY = bytes(32)
_SUFFIX = ".page"
_ASIDE = ".tmp"
_LOCK = "lock"
_NAME = re.compile(r"([0-9a-f]{64})-([0-9a-f]{16})" + re.escape(_SUFFIX))


class DiskReadError(Exception):
    """A page could not be read; ``reason`` is ``missing``, ``short``, ``corrupt``, ``foreign`` or
    ``io``. Its file is gone, so that it is not tried again."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"a page on disk is {reason}")
        self.reason = reason


class DiskStore:
    """Pages of one model and page layout below a folder. Thread-safe.

    Args:
        folder: may be shared by servers of different models; made if missing.
        fingerprint: names the weights and the layout of a page; pages of others are never read.
        page_bytes: bytes of one page in all layers.
        max_bytes: of all files together.
        policy: name of the eviction policy.
        clock: seconds that only grow, for the expiry of pins.

    Raises:
        ConfigError: the folder cannot be used, another process uses it for the same model, or
            ``max_bytes`` holds no page.
    """

    def __init__(
        self,
        folder: Path,
        *,
        fingerprint: bytes,
        page_bytes: int,
        max_bytes: int,
        policy: str = DEFAULT_POLICY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self.file_bytes = HEADER_BYTES + page_bytes
        self.max_bytes = max_bytes
        if max_bytes < self.file_bytes:
            raise ConfigError(
                f"the disk tier has {max_bytes} bytes, but one page needs {self.file_bytes}; "
                "give it more"
            )
        self._page_bytes = page_bytes
        self._fingerprint = hashlib.sha256(b"bicl disk page 1" + fingerprint).digest()
        self._folder = folder / self._fingerprint.hex()[:32]
        self._mutex = threading.Lock()
        self._epoch = 0
        self._number = 0
        self._deletion: threading.Thread | None = None
        self.num_bytes = 0
        self.evicted_pages = 0
        self.evicted_seconds = 0.0  # since their last use, summed
        # Chains used in the tiers above; looked at only when something must leave.
        self.used_elsewhere: deque[Sequence[bytes]] = deque(maxlen=USED_CHAINS)
        most = max_bytes // self.file_bytes
        self._index = BlockIndex(make_policy(policy, most), clock, _PARENT_BYTES)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock_file = locked(self._folder / _LOCK)
        except OSError as error:
            raise ConfigError(f"the disk tier cannot use {folder}: {error}") from error
        try:
            self._prune_others()
            self._scan()
        except OSError as error:
            self._lock_file.close()
            raise ConfigError(f"the disk tier cannot use {folder}: {error}") from error

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, key: bytes) -> bool:
        with self._mutex:
            return self._index.get(key) is not None

    def touch(self, keys: Sequence[bytes]) -> None:
        """Pages of one chain were asked for, given first to last."""
        with self._mutex:
            self._touch(keys)

    def pin(self, keys: list[bytes], until: float) -> None:
        """Do not evict those of these pages that are here before ``until``; 0 takes a pin off."""
        with self._mutex:
            for block in (self._index.get(key) for key in keys):
                if block is not None:
                    block.pinned_until = until

    def write(self, key: bytes, parent: bytes, ids: bytes, group: str, page: memoryview) -> bool:
        """Store a page; False if it is there already or was flushed meanwhile.

        Raises:
            OSError: the disk refused; nothing was left behind.
        """
        with self._mutex:
            if self._index.get(key) is not None:
                return False
            if not self._make_room():
                return False
            self._number += 1
            number, epoch = self._number, self._epoch
        block = Block(key, parent, ids, _folder_of(group), self.file_bytes)
        path = self._path(block)
        aside = self._folder / f"{number}{_ASIDE}"
        header = self._header(key, parent, ids, page)
        try:
            write_file(aside, [header, page])
            with self._mutex:
                if epoch != self._epoch:
                    aside.unlink()
                    return False
                path.parent.mkdir(exist_ok=True)
                aside.replace(path)
                self._index.add(block)
                self.num_bytes += self.file_bytes
        except OSError:
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)
            raise
        return True

    def read(self, key: bytes, ids: bytes, into: memoryview) -> None:
        """Read a page and verify it.

        Args:
            ids: packed token ids that it must hold.
            into: ``page_bytes`` writable bytes; undefined after an error.

        Raises:
            DiskReadError: anything about it is wrong.
        """
        with self._mutex:
            block = self._index.get(key)
        if block is None:
            raise DiskReadError("missing")
        try:
            header, size = read_file(self._path(block), HEADER_BYTES, into)
        except FileNotFoundError:
            reason: str | None = "missing"
        except OSError:
            reason = "io"
        else:
            reason = self._fault(header, size, key, ids, into)
        if reason is not None:
            self.discard(key)
            raise DiskReadError(reason)

    def in_memory(self, keys: Sequence[bytes]) -> bool:
        """Whether the kernel has the files of these pages in memory, as far as their ends tell."""
        with self._mutex:
            blocks = [self._index.get(key) for key in keys]
        ends = (0, self.file_bytes - 1)
        return all(block and in_memory(self._path(block), ends) for block in blocks)

    def write_probe(self, page: memoryview) -> Path:
        """A file like a page's that is on the disk and, where that is possible, no longer in the
        kernel's memory: for :meth:`read_probe`, and then to be deleted.

        Raises:
            OSError: the disk refused.
        """
        with self._mutex:
            self._number += 1
            path = self._folder / f"{self._number}{_ASIDE}"
        write_file(path, [self._header(_NOBODY, _NOBODY, b"", page), page], drop=True)
        return path

    def read_probe(self, path: Path, into: memoryview) -> None:
        """Read and verify a probe as a page is.

        Raises:
            OSError: it cannot be read, or is not what was written.
        """
        header, size = read_file(path, HEADER_BYTES, into)
        if fault := self._fault(header, size, _NOBODY, b"", into):
            raise OSError(f"what was written came back {fault}")

    def discard(self, key: bytes) -> None:
        """Delete a page, if it is there."""
        with self._mutex:
            block = self._index.get(key)
            if block is not None:
                self._delete(block)

    def flush(self, group: str | None = None) -> int:
        """Forget every page, or those of one group. Returns how many. Their folders are renamed at
        once, which a crash cannot undo, and deleted in the background."""
        with self._mutex:
            self._epoch += 1
            name = None if group is None else _folder_of(group)
            gone = [block for block in self._index if name in (None, block.group)]
            asides = []
            for folder in {block.group for block in gone}:
                self._number += 1
                asides.append(self._folder / f"{self._number}{_ASIDE}")
                with contextlib.suppress(OSError):
                    (self._folder / folder).rename(asides[-1])
            for block in gone:
                self._delete(block)
        self._deletion = threading.Thread(target=delete_folders, args=(asides,), daemon=True)
        self._deletion.start()
        return len(gone)

    def close(self) -> None:
        """Let another process use the folder."""
        if self._deletion is not None:
            self._deletion.join()
        self._lock_file.close()

    # --- inside ------------------------------------------------------------------------------
    def _header(self, key: bytes, parent: bytes, ids: bytes, page: memoryview) -> bytes:
        def packed(checksum: bytes) -> bytes:
            fixed = _HEADER.pack(
                _MAGIC,
                FORMAT_VERSION,
                len(ids),
                self._page_bytes,
                key,
                parent,
                self._fingerprint,
                checksum,
            )
            return (fixed + ids).ljust(HEADER_BYTES, b"\0")

        return packed(_checksum(packed(bytes(16)), page))

    def _fault(
        self, header: bytes, size: int, key: bytes, ids: bytes, page: memoryview
    ) -> str | None:
        """What is wrong with a file's contents; None if nothing is."""
        if size != self.file_bytes:
            return "short" if size < self.file_bytes else "corrupt"
        magic, version, ids_bytes, page_bytes, its_key, _, fingerprint, checksum = (
            _HEADER.unpack_from(header)
        )
        if (magic, version, page_bytes) != (_MAGIC, FORMAT_VERSION, self._page_bytes):
            return "corrupt"
        blank = header[: _HEADER.size - 16] + bytes(16) + header[_HEADER.size :]
        if _checksum(blank, page) != checksum:
            return "corrupt"
        stored = header[_HEADER.size : _HEADER.size + ids_bytes]
        if (its_key, fingerprint, stored) != (key, self._fingerprint, ids):
            return "foreign"
        return None

    def _path(self, block: Block) -> Path:
        name = f"{block.key.hex()}-{block.parent[:_PARENT_BYTES].hex()}{_SUFFIX}"
        return self._folder / block.group / name

    def _touch(self, keys: Sequence[bytes]) -> None:
        found = (self._index.get(key) for key in keys)
        self._index.touch(block for block in found if block is not None)

    def _make_room(self) -> bool:
        while self.num_bytes + self.file_bytes > self.max_bytes:
            while self.used_elsewhere:
                self._touch(self.used_elsewhere.popleft())
            victim = self._index.victim(lambda block: block.pinned_until <= self._clock())
            if victim is None:
                return False
            self.evicted_pages += 1
            self.evicted_seconds += self._index.age(victim)
            self._delete(victim)
        return True

    def _delete(self, block: Block) -> None:
        with contextlib.suppress(OSError):
            self._path(block).unlink(missing_ok=True)
        self._index.remove(block)
        self.num_bytes -= block.place

    def _scan(self) -> None:
        """Find the pages of earlier runs; the oldest files count as least recently used."""
        found: list[tuple[float, Block]] = []
        for aside in self._folder.glob(f"*{_ASIDE}"):
            if aside.is_dir():
                shutil.rmtree(aside)
            else:
                aside.unlink()
        for file in files_below(self._folder):
            if name := _NAME.fullmatch(file.name):
                key, parent = bytes.fromhex(name[1]), bytes.fromhex(name[2])
                stat, group = file.stat(), Path(file.path).parent.name
                found.append((stat.st_mtime, Block(key, parent, b"", group, stat.st_size)))
        for _, block in sorted(found, key=lambda item: item[0]):
            self._index.add(block)
            self.num_bytes += block.place
        while self.num_bytes > self.max_bytes:
            victim = self._index.victim(lambda block: True)
            assert victim is not None
            self._delete(victim)

    def _prune_others(self) -> None:
        """Delete pages of models that no process uses, oldest first, while they take more than
        ``max_bytes``."""
        others = []
        for path in self._folder.parent.iterdir():
            if path != self._folder and (path / _LOCK).is_file():
                others.append((path.stat().st_mtime, size_below(path), path))
        total = sum(size for _, size, _ in others)
        for _, size, path in sorted(others):
            if total <= self.max_bytes:
                return
            with contextlib.suppress(ConfigError, OSError), locked(path / _LOCK):
                shutil.rmtree(path)
                total -= size


def _folder_of(group: str) -> str:
    """A group's folder: no text from outside becomes part of a path."""
    return hashlib.sha256(group.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _checksum(header: bytes, page: memoryview) -> bytes:
    digest = xxhash.xxh3_128(header)
    digest.update(page)
    return digest.digest()
