"""Real texts that every Debian and every Python has on disk: nothing is downloaded.

``prose``   the language reference that Python carries for ``help()`` (``pydoc_data.topics``)
``code``    modules of Python's standard library
``legal``   licences of Debian's package base-files
"""

from __future__ import annotations

import functools
import hashlib
import pydoc_data.topics
import sysconfig
from pathlib import Path

__all__ = ["KINDS", "digest", "prose_paragraphs", "read_kind"]

CODE = (
    "inspect.py", "tarfile.py", "typing.py", "subprocess.py", "zipfile.py",
    "ipaddress.py", "difflib.py", "doctest.py", "pickle.py",
)  # fmt: skip
LEGAL = (
    "GFDL-1.3", "MPL-2.0", "LGPL-2.1", "Apache-2.0", "GFDL-1.2", "MPL-1.1", "GPL-2", "GPL-1",
    "LGPL-3", "Artistic", "CC0-1.0", "BSD", "LGPL-2",
)  # fmt: skip
NO_PROSE = (">>>", "+--", "::=", "---")
TOPICS = (
    "specialnames", "compound", "formatstrings", "types", "debugger", "typesseq", "assignment",
    "exprlists", "execmodel", "import", "comparisons", "customization", "string-methods",
    "strings", "operator-summary", "calls", "identifiers", "objects", "raise", "subscriptions",
    "binary", "class", "dict", "augassign", "slicings",
)  # fmt: skip


@functools.cache
def read_kind(kind: str) -> str:
    """The texts of one kind, one after the other in a fixed order."""
    return "\n\n".join(KINDS[kind]())


@functools.cache
def prose_paragraphs() -> list[str]:
    """Paragraphs of running text, for haystacks: at least 200 characters, no code, no tables."""
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


KINDS = {"prose": _prose, "code": _code, "legal": _legal}
