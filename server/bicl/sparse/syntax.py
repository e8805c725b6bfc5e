"""Where the parts of code and structured text begin: what syntax awareness always keeps."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from bicl.errors import ConfigError

__all__ = ["boundaries", "require_parser", "to_tokens"]

LANGUAGES = ("python", "javascript", "java", "c", "cpp", "go", "rust", "json")
_ALIASES = {"py": "python", "js": "javascript", "ts": "javascript", "c++": "cpp", "rs": "rust"}
MAX_BOUNDARIES = 4096
MAX_DEPTH = 6
GUESSED_CHARACTERS = 8_000

_FENCE = re.compile(r"^```([\w+#-]*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Headings, numbered clauses, list letters: the joints of law and of documents.
_CLAUSE = re.compile(
    r"^[ \t]*(?:#{1,6} |(?:Section|Article|Clause|Chapter|Part|Schedule|Annex|§)[ \t]*[\dIVX]|"
    r"\d+(?:\.\d+)*[.)][ \t]|\([a-z]{1,3}\)[ \t]|[A-Z][A-Z \t]{6,}$)",
    re.MULTILINE,
)


def require_parser() -> None:
    """Refuse syntax awareness at start where its parser is missing.

    Raises:
        ConfigError: naming the packages.
    """
    if find_spec("tree_sitter") is None or find_spec("tree_sitter_python") is None:
        raise ConfigError(
            "--hysparse-enable-sg needs tree-sitter and its grammars: pip install 'bicl[syntax]', "
            "or leave it out"
        )


def boundaries(text: str, *, code: bool) -> list[int]:
    """Characters at which a node or a clause begins, the outermost first.

    Args:
        text: a prompt.
        code: the whole of it is code. Elsewhere fenced blocks are, and the rest has clauses.
    """
    found: list[tuple[int, int]] = []  # depth, place
    blocks = [(match[1], match.start(2), match[2]) for match in _FENCE.finditer(text)]
    if code and not blocks:
        blocks = [("", 0, text)]
    for language, start, block in blocks:
        found += [(depth, start + place) for depth, place in _nodes(block, language)]
    if not code:
        found += [(1, match.start()) for match in _CLAUSE.finditer(text)]
    return list(dict.fromkeys(place for _, place in sorted(found)))[:MAX_BOUNDARIES]


def _nodes(block: str, language: str) -> list[tuple[int, int]]:
    """Depth and first character of the nodes that span lines, and of all outermost ones."""
    name = _ALIASES.get(language.lower(), language.lower())
    parser = _parser(name) if name in LANGUAGES else _guess(block)
    if parser is None:
        return []
    data = block.encode()
    whole = len(data) == len(block)
    queue = deque((child, 1) for child in parser.parse(data).root_node.named_children)
    found: list[tuple[int, int]] = []
    while queue and len(found) < MAX_BOUNDARIES:
        node, depth = queue.popleft()
        spans = node.end_point[0] > node.start_point[0]
        if depth == 1 or spans:
            byte = node.start_byte
            found.append((depth, byte if whole else len(data[:byte].decode(errors="ignore"))))
        if spans and depth < MAX_DEPTH:
            queue.extend((child, depth + 1) for child in node.named_children)
    return found


def _guess(block: str) -> Any:
    """The grammar that understands most of the beginning."""
    data = block[:GUESSED_CHARACTERS].encode()
    parsers = [parser for name in LANGUAGES if (parser := _parser(name)) is not None]
    errors = [_error_bytes(parser.parse(data).root_node) for parser in parsers]
    if not errors or min(errors) > len(data) // 4:
        return None
    return parsers[errors.index(min(errors))]


def _error_bytes(root: Any) -> int:
    total, stack = 0, [root]
    while stack:
        node = stack.pop()
        if node.type == "ERROR" or node.is_missing:
            total += max(1, node.end_byte - node.start_byte)
        elif node.has_error:
            stack.extend(node.children)
    return total


def _parser(name: str) -> Any:
    """A parser of the caller's own: requests are read on many threads. None: not installed."""
    language = _language(name)
    if language is None:
        return None
    from tree_sitter import Parser

    return Parser(language)


@cache
def _language(name: str) -> Any:
    if find_spec(f"tree_sitter_{name}") is None:
        return None
    from tree_sitter import Language

    return Language(import_module(f"tree_sitter_{name}").language())


def to_tokens(places: Sequence[int], starts: Sequence[int]) -> list[int]:
    """Tokens in which characters lie, in the order of ``places``.

    Args:
        starts: first character of each token, ascending.
    """
    return list(dict.fromkeys(max(0, bisect_right(starts, place) - 1) for place in places))
