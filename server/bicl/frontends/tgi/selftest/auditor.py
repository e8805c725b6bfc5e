"""The driver's side of :mod:`audit`."""

from __future__ import annotations

from collections.abc import Iterable
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

from bicl.frontends.tgi.selftest.audit import KEY, Difference

__all__ = ["Auditor"]


class Auditor:
    """Asks every rank of a shard that was started with ``TEST_AUDIT``."""

    def __init__(self, folder: Path, world_size: int) -> None:
        self._connections = [
            Client(str(folder / f"audit-{rank}"), authkey=KEY) for rank in range(world_size)
        ]

    def differences(self) -> list[Difference]:
        """By rank."""
        return [Difference(**each) for each in self._ask("difference")]

    def settled(self) -> list[bool]:
        """By rank, whether the tiers have nothing under way."""
        return self._ask("settled")

    def cached_tokens(self, request: int) -> list[int]:
        """By rank, prompt tokens that a request did not compute."""
        return self._ask("cached", [request])

    def counters(self) -> list[dict[str, int]]:
        """By rank, what the shard's metrics say of claimed prefixes."""
        return self._ask("counters")

    def tiles_skipped(self) -> list[int]:
        """By rank, tiles that HySparse left out since the start."""
        return self._ask("skipped")

    def largest_steps(self) -> list[int]:
        """By rank, the most query tokens of a step outside graphs since this was last asked."""
        return self._ask("largest")

    def poison(self, pages: Iterable[int]) -> None:
        """Fill pages that belong to nobody with NaN."""
        self._ask("poison", pages)

    def written(self, pages: Iterable[int]) -> set[int]:
        """Those of the pages that are no longer full of NaN in every layer of every rank."""
        return set().union(*self._ask("written", pages))

    def digests(self, pages: Iterable[int]) -> list[list[tuple[int, ...]]]:
        """Checksums of every page, one a layer, by rank."""
        return self._ask("digest", pages)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()

    def _ask(self, command: str, pages: Iterable[int] = ()) -> list[Any]:
        wanted = list(pages)
        for connection in self._connections:
            connection.send((command, wanted))
        answers = [connection.recv() for connection in self._connections]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers
