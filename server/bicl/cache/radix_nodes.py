"""What the radix tree is made of, and what its methods answer. See :mod:`bicl.cache.radix`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from bicl.cache.keys import ID_BYTES, Namespace

__all__ = ["Evicted", "Inserted", "Match", "Node", "PartialPage", "common_tokens"]


@dataclass(slots=True, eq=False)
class Node:
    """A run of pages. Roots have none and carry their namespace instead.

    Attributes:
        ids: packed token ids; ``len(pages)`` whole pages, or less than one in a partial leaf.
        pages: page ids.
        keys: chain key of each page; for a root, its namespace's key alone.
        parent: None for a root.
        child_ids: ids of each child's first page, sorted; ``children`` in the same order.
        refs: locks on this node and its descendants.
        last_used: when the last lock was taken off, in the caller's seconds.
    """

    ids: bytearray
    pages: list[int]
    keys: list[bytes]
    parent: Node | None
    namespace: Namespace | None = None
    child_ids: list[bytes] = field(default_factory=list)
    children: list[Node] = field(default_factory=list)
    refs: int = 0
    last_used: float = 0.0

    def path(self) -> Iterator[Node]:
        """This node and its ancestors, the root last."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    def subtree(self) -> Iterator[Node]:
        """This node and its descendants, parents first."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children)


class PartialPage(NamedTuple):
    """A page whose first ``num_tokens`` tokens match and whose others do not; ``key`` is its own,
    of all its tokens."""

    node: Node
    page: int
    num_tokens: int
    key: bytes


class Match(NamedTuple):
    """How far token ids follow the tree.

    Attributes:
        node: deepest node reached.
        num_node_pages: how many of its pages match, from the first.
        pages: all whole pages that match, in order; ``keys`` are theirs.
        partial: the best page to copy the next tokens from.
    """

    node: Node
    num_node_pages: int
    pages: list[int]
    keys: list[bytes]
    partial: PartialPage | None

    def first(self, num_pages: int) -> Match | None:
        """The match of the first ``num_pages`` pages only; None if that is none."""
        node, excess = self.node, len(self.pages) - num_pages
        held = self.num_node_pages
        while excess >= held and node.parent is not None:
            excess -= held
            node = node.parent
            held = len(node.pages)
        if not num_pages:
            return None
        pages, keys = self.pages[:num_pages], self.keys[:num_pages]
        return Match(node, held - excess, pages, keys, None)


class Inserted(NamedTuple):
    """Result of an insertion.

    Attributes:
        node: where the inserted chain ends.
        num_present: pages, from the first, that the tree held already; it did not take these.
        dropped: pages that left the tree because a longer one now covers them.
    """

    node: Node
    num_present: int
    dropped: list[int]


class Evicted(NamedTuple):
    """Pages that left the tree together, and when they were last used."""

    pages: list[int]
    last_used: float


def common_tokens(left: bytes | bytearray, right: bytes | bytearray, offset: int = 0) -> int:
    """Length of the common prefix of ``left`` and ``right[offset:]`` in tokens."""
    count = min(len(left), len(right) - offset) // ID_BYTES
    if count <= 0 or left[:ID_BYTES] != right[offset : offset + ID_BYTES]:
        return 0  # strangers: most of what is compared
    differ = np.frombuffer(left, np.int64, count) != np.frombuffer(right, np.int64, count, offset)
    first = int(differ.argmax())
    return first if differ[first] else count
