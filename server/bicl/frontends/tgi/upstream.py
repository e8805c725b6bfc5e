"""Which release of text-generation-inference a tree is, by the files we stand on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from bicl.errors import ConfigError

__all__ = ["Release", "Upstream", "identify", "read_upstream"]

DISABLE = "BICL_DISABLE=1 starts it without BICL"


@dataclass
class Upstream:
    """The facts of ``patches/UPSTREAM``.

    Attributes:
        releases: known releases, oldest first.
        limits: what does not work, with the releases where it does not.
        files: by path, the releases of each known checksum.
    """

    releases: tuple[str, ...] = ()
    limits: list[tuple[str, frozenset[str]]] = field(default_factory=list)
    files: dict[str, dict[str, frozenset[str]]] = field(default_factory=dict)

    def span(self, text: str) -> frozenset[str]:
        """``3.2.1-3.3.7`` or ``3.0.2`` as a set of releases."""
        first, _, last = text.partition("-")
        begin, end = self.releases.index(first), self.releases.index(last or first)
        return frozenset(self.releases[begin : end + 1])


@dataclass(frozen=True)
class Release:
    """What a tree turned out to be.

    Attributes:
        names: the releases it may be; their files do not differ where it matters.
        limits: what does not work with it.
    """

    names: tuple[str, ...]
    limits: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.names[0] if len(self.names) == 1 else f"{self.names[0]}-{self.names[-1]}"

    @property
    def windows(self) -> bool:
        """Sliding windows work: the whole sequence is stored."""
        return "sliding windows" not in self.limits


def read_upstream(path: Path) -> Upstream:
    """Parse ``patches/UPSTREAM``; its head describes the format."""
    upstream = Upstream()
    for line in path.read_text().splitlines():
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if words[0] == "release":
            upstream.releases = tuple(words[1:])
        elif words[0] == "limit":
            upstream.limits.append((" ".join(words[2:]), upstream.span(words[1])))
        else:
            checksum, releases, name = words
            upstream.files.setdefault(name, {})[checksum] = upstream.span(releases)
    return upstream


def identify(package: Path, upstream: Upstream) -> Release:
    """Find out which release the tree at ``package`` (text_generation_server) is.

    Raises:
        ConfigError: a file is missing or unknown, or the files are of no one release.
    """
    known = f"known releases are {upstream.releases[0]} to {upstream.releases[-1]}"
    possible = set(upstream.releases)
    if (package / "utils" / "paged_attention.py").is_file():
        raise ConfigError(
            f"{package} is text-generation-inference 2.0.2 or another 2.x, whose cache has "
            f"another shape; {known}. Use such an image; {DISABLE}"
        )
    for name, checksums in upstream.files.items():
        path = package / name
        if not path.is_file():
            raise ConfigError(f"{path} is missing; {known}; {DISABLE}")
        found = checksums.get(hashlib.sha256(path.read_bytes()).hexdigest())
        if found is None:
            raise ConfigError(
                f"{path} is of no release that BICL was tested with; {known}. Use an image of one "
                f"of them, unedited; {DISABLE}"
            )
        if not possible & found:
            raise ConfigError(
                f"{path} belongs to {_names(found, upstream)}, but the files before it to "
                f"{_names(possible, upstream)}: a mixed tree; {DISABLE}"
            )
        possible &= found
    limits = tuple(text for text, releases in upstream.limits if possible <= releases)
    return Release(tuple(r for r in upstream.releases if r in possible), limits)


def _names(releases: Iterable[str], upstream: Upstream) -> str:
    chosen = set(releases)
    return ", ".join(r for r in upstream.releases if r in chosen)
