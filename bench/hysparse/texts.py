"""Real texts that every Debian and every Python has on disk: nothing is downloaded.

``prose``    the language reference that Python carries for ``help()`` (``pydoc_data.topics``)
``code``     modules of Python's standard library
``legal``    licences of Debian's package base-files
``manuals``  books about Debian and the Jargon File, where their packages are installed
             (``apt-get install debian-faq developers-reference debian-policy jargon-text``)

They differ a little from one release to the next. ``python -m bench.hysparse.texts FOLDER`` writes
those of this machine into a folder, for :func:`read_from` on another.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import hashlib
import pydoc_data.topics
import sysconfig
from collections.abc import Sequence
from pathlib import Path

__all__ = ["KINDS", "digest", "main", "prose_paragraphs", "read_from", "read_kind"]

CODE = (
    "inspect.py", "tarfile.py", "typing.py", "subprocess.py", "zipfile.py",
    "ipaddress.py", "difflib.py", "doctest.py", "pickle.py",
)  # fmt: skip
LEGAL = (
    "GFDL-1.3", "MPL-2.0", "LGPL-2.1", "Apache-2.0", "GFDL-1.2", "MPL-1.1", "GPL-2", "GPL-1",
    "LGPL-3", "Artistic", "CC0-1.0", "BSD", "LGPL-2",
)  # fmt: skip
MANUALS = (
    "doc/debian/FAQ/debian-faq.en.txt.gz",
    "developers-reference/developers-reference.txt.gz",
    "doc/debian-policy/policy.txt.gz",
    "doc/jargon-text/jargon.txt.gz",
)
NO_PROSE = (">>>", "+--", "::=", "---")
TOPICS = (
    "specialnames", "compound", "formatstrings", "types", "debugger", "typesseq", "assignment",
    "exprlists", "execmodel", "import", "comparisons", "customization", "string-methods",
    "strings", "operator-summary", "calls", "identifiers", "objects", "raise", "subscriptions",
    "binary", "class", "dict", "augassign", "slicings",
)  # fmt: skip


_PARAGRAPHS = "paragraphs"


class _Source:
    """Where texts are taken from: a folder, or (None) this machine."""

    folder: Path | None = None


def read_from(folder: Path | None) -> None:
    """From now on take all texts from a folder that ``python -m bench.hysparse.texts`` wrote.

    Raises:
        FileNotFoundError: it holds no such texts.
    """
    if folder is not None and not (folder / f"{_PARAGRAPHS}.txt").is_file():
        raise FileNotFoundError(f"{folder}: no texts that python -m bench.hysparse.texts wrote")
    _Source.folder = folder
    read_kind.cache_clear()
    prose_paragraphs.cache_clear()


@functools.cache
def read_kind(kind: str) -> str:
    """The texts of one kind, one after the other in a fixed order; empty where there are none."""
    if _Source.folder is not None:
        return (_Source.folder / f"{kind}.txt").read_text()
    return "\n\n".join(KINDS[kind]())


@functools.cache
def prose_paragraphs() -> list[str]:
    """Paragraphs of running text, for haystacks: at least 200 characters, no code, no tables."""
    if _Source.folder is not None:
        return (_Source.folder / f"{_PARAGRAPHS}.txt").read_text().split("\n")
    paragraphs = []
    for topic in sorted(pydoc_data.topics.topics):
        for block in pydoc_data.topics.topics[topic].split("\n\n"):
            lines = block.strip().splitlines()
            plain = " ".join(line.strip() for line in lines)
            if len(plain) >= 200 and not any(mark in plain for mark in NO_PROSE):
                paragraphs.append(plain)
    return paragraphs


def digest(text: str) -> str:
    """First 12 hex digits of the text's SHA-256: the same inputs give the same ones."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _prose() -> list[str]:
    topics = pydoc_data.topics.topics
    return [topics[name] for name in TOPICS if name in topics]


def _code() -> list[str]:
    library = Path(sysconfig.get_paths()["stdlib"])
    return [(library / name).read_text() for name in CODE if (library / name).is_file()]


def _legal() -> list[str]:
    folder = Path("/usr/share/common-licenses")
    return [(folder / name).read_text() for name in LEGAL if (folder / name).is_file()]


def _manuals() -> list[str]:
    files = [Path("/usr/share") / name for name in MANUALS]
    return [gzip.decompress(file.read_bytes()).decode() for file in files if file.is_file()]


KINDS = {"prose": _prose, "code": _code, "legal": _legal, "manuals": _manuals}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="write this machine's texts into a folder")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(argv).folder
    folder.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        (folder / f"{kind}.txt").write_text(read_kind(kind))
        print(f"{kind}: {len(read_kind(kind))} characters, {digest(read_kind(kind))}")
    (folder / f"{_PARAGRAPHS}.txt").write_text("\n".join(prose_paragraphs()))


if __name__ == "__main__":
    main()
