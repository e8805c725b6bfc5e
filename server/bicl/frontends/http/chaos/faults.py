"""Faults to put into an engine's parts. Each is taken out again at the end of its ``with``."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bicl.frontends.http.chaos.rig import PATIENCE_SECONDS, Rig, require

__all__ = ["Gate", "files_of", "replaced", "slowed", "spoil", "torn"]


@contextmanager
def replaced(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Any]) -> Iterator[None]:
    """Put ``wrap(method)`` in the place of a method of one object."""
    method = getattr(owner, name)
    own = vars(owner).get(name)
    setattr(owner, name, wrap(method))
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


class Gate:
    """Holds a call up. ``fail``: raise this when the gate opens."""

    def __init__(self, *, after: int = 0, fail: Exception | None = None) -> None:
        self.calls = 0
        self._after = after
        self._fail = fail
        self._reached = threading.Event()
        self._open = threading.Event()

    def wrap(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def held(*args: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls == self._after + 1:
                self._reached.set()
                require(self._open.wait(PATIENCE_SECONDS), "a gate stayed shut")
                if self._fail is not None:
                    raise self._fail
            return method(*args, **options)

        return held

    def wait(self) -> None:
        """Until the call is there."""
        require(self._reached.wait(PATIENCE_SECONDS), "nobody came to the gate")

    def open(self) -> None:
        self._open.set()


def torn(
    rng: random.Random, share: float, error: Exception, fired: list[int]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Calls raise ``error``, each with the probability ``share``. ``fired`` counts in ``[0]``."""

    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if rng.random() < share:
                fired[0] += 1
                raise error
            return method(*args, **options)

        return call

    return wrap


def slowed(seconds: float) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Calls take that much longer."""

    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            time.sleep(seconds)
            return method(*args, **options)

        return call

    return wrap


def files_of(rig: Rig) -> list[Path]:
    """The disk tier's pages, sorted by name."""
    require(rig.tiers.settle(PATIENCE_SECONDS), "the tiers did not come to rest")
    return sorted(rig.lab.folder.rglob("*.page"))


def spoil(files: list[Path], how: str, rng: random.Random) -> None:
    """Damage files. ``how``: ``short`` (cut off), ``corrupt`` (one bit turned), ``missing``
    (deleted), ``foreign`` (each has the contents of another), ``empty``."""
    require(files, "no page was written to disk")
    contents = [file.read_bytes() for file in files]
    for number, (file, content) in enumerate(zip(files, contents, strict=True)):
        if how == "short":
            file.write_bytes(content[: rng.randrange(1, len(content))])
        elif how == "empty":
            file.write_bytes(b"")
        elif how == "corrupt":
            at = rng.randrange(len(content))
            turned = bytes([content[at] ^ 1 << rng.randrange(8)])
            file.write_bytes(content[:at] + turned + content[at + 1 :])
        elif how == "missing":
            file.unlink()
        elif how == "foreign":
            file.write_bytes(contents[(number + 1) % len(contents)])
        else:
            raise ValueError(how)
