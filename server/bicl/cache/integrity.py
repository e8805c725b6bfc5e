"""Proofs that page accounting holds. Slow and thorough; everything is counted anew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from bicl.cache.allocator import PageAllocator
from bicl.cache.radix import RadixIndex
from bicl.cache.radix_nodes import Node
from bicl.cache.sequence import SequencePages
from bicl.errors import IntegrityError

__all__ = ["check_counts", "check_index"]


def _require(condition: bool, contradiction: str) -> None:
    if not condition:
        raise IntegrityError(contradiction)


def check_index(index: RadixIndex, locked: Iterable[Node]) -> None:
    """The tree is well formed and its locks are exactly those in ``locked``, one an entry.

    Raises:
        IntegrityError: naming the contradiction.
    """
    locks: Counter[int] = Counter(id(node) for lock in locked for node in lock.path())
    nodes: list[Node] = []
    for namespace, root in index.roots.items():
        _require(root.namespace == namespace, f"{namespace} leads to the root of another")
        _require(bool(root.children or root.refs), f"the root of {namespace} is bare")
        for node in root.subtree():
            _require(node.refs == locks.pop(id(node), 0), f"wrong lock count on {_name(node)}")
            _check_children(node, index.page_bytes)
            if node is not root:
                _check_run(node, index.page_bytes)
                nodes.append(node)
    _require(not locks, f"{len(locks)} locked nodes are not in the index")
    pages = [page for node in nodes for page in node.pages]
    _require(len(set(pages)) == len(pages), "a page is in the index twice")
    _require(len(pages) == index.num_pages, f"{len(pages)} pages are counted {index.num_pages}")
    held = sum(len(node.pages) for node in nodes if node.refs)
    _require(held == index.num_locked_pages, f"{held} locked pages, not {index.num_locked_pages}")
    _check_queue(index, nodes)


def _check_run(node: Node, page_bytes: int) -> None:
    _require(bool(node.pages), "a node without pages")
    _require(len(node.keys) == len(node.pages), f"{_name(node)}: keys and pages differ")
    whole = len(node.ids) == len(node.pages) * page_bytes
    partial = 0 < len(node.ids) < page_bytes and len(node.pages) == 1 and not node.children
    _require(whole or partial, f"{_name(node)}: {len(node.ids)} bytes of ids do not fit")


def _check_children(node: Node, page_bytes: int) -> None:
    first_pages = [bytes(child.ids[:page_bytes]) for child in node.children]
    _require(first_pages == node.child_ids, f"{_name(node)}: children and their ids differ")
    _require(sorted(set(first_pages)) == first_pages, f"{_name(node)}: children out of order")
    _require(all(c.parent is node for c in node.children), f"{_name(node)}: a child is astray")


def _check_queue(index: RadixIndex, nodes: list[Node]) -> None:
    place = {id(node): number for number, node in enumerate(index.order.candidates())}
    unlocked = {id(node) for node in nodes if node.refs == 0}
    _require(set(place) == unlocked, "the eviction queue does not hold exactly what is unlocked")
    for node in nodes:
        parent = node.parent
        if parent is not None and id(parent) in place:
            _require(
                place[id(node)] < place[id(parent)], f"{_name(parent)} is queued before a child"
            )


def check_counts(
    allocator: PageAllocator,
    index: RadixIndex,
    sequences: Iterable[SequencePages],
    abandoned: Iterable[int] = (),
) -> None:
    """Every page is held as often as the index, live sequences and given-up copies account
    for.

    Raises:
        IntegrityError: naming the first pages that differ.
    """
    expected: Counter[int] = Counter(abandoned)
    for root in index.roots.values():
        for node in root.subtree():
            expected.update(node.pages)
    for seq in sequences:
        expected.update(seq.page_ids)
        expected.update(copy.source for copy in seq.pending_copies)
    wrong = [
        f"page {page} is held {allocator.references(page)} times, accounted for {expected[page]}"
        for page in range(allocator.num_pages)
        if allocator.references(page) != expected[page]
    ]
    _require(not wrong, "; ".join(wrong[:4]))


def _name(node: Node) -> str:
    return f"the node of pages {node.pages[:4]}"
