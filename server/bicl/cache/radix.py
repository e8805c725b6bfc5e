"""Radix tree over whole pages: match, lock, insert, evict.

A node is a run of pages without a branch. Its ids lie in one buffer, so a long prefix costs one
``memcmp``; a branch costs one binary search among the siblings' first pages, which are kept
sorted. Between sorted neighbours the longest common prefix of anything looked up is found too,
so the best page to copy from needs no further search. No hash takes part in a lookup.

A *partial leaf* holds one page that is not full. Nothing follows it; it serves only as the source
of a copy.

A lock on a node stands for its whole path: ``refs`` counts the locks on a node and below it. The
eviction policy orders the unlocked nodes. A path is unlocked leaf first, and whoever uses a node
uses its ancestors, so descendants always come before it and the first candidate is a leaf.

The tree handles page ids; the caller owns the reference counts behind them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Container

from bicl.cache.keys import ID_BYTES, HashFunction, Namespace, chain_key, sha256
from bicl.cache.policy import DEFAULT_POLICY, EvictionPolicy, make_policy
from bicl.cache.radix_nodes import Evicted, Inserted, Match, Node, PartialPage, common_tokens

__all__ = ["RadixIndex"]


class RadixIndex:
    """Prefixes of one pool, one tree a namespace.

    Args:
        page_size: tokens a page.
        root_key: key of a namespace's root.
        hash_function: names the pages; lookups do not depend on it.
        policy: of eviction, by name.

    Attributes:
        order: of the unlocked nodes.
        version: grows with every change after which a :class:`Match` may be out of date.
    """

    def __init__(
        self,
        page_size: int,
        root_key: Callable[[Namespace], bytes],
        hash_function: HashFunction = sha256,
        policy: str = DEFAULT_POLICY,
    ) -> None:
        self.page_bytes = page_size * ID_BYTES
        self.roots: dict[Namespace, Node] = {}
        self.order: EvictionPolicy[Node] = make_policy(policy, 0)
        self._policy = policy
        self.num_pages = 0
        self.num_locked_pages = 0
        self.version = 0
        self._root_key = root_key
        self.hash_function = hash_function

    @property
    def num_evictable_pages(self) -> int:
        return self.num_pages - self.num_locked_pages

    # --- match -------------------------------------------------------------------------------
    def match(self, namespace: Namespace, ids: bytes, max_tokens: int) -> Match | None:
        """Longest prefix of at most ``max_tokens`` tokens. Changes nothing; None if no token."""
        root = self.roots.get(namespace)
        if root is None:
            return None
        found = self._descend(root, ids, max_tokens * ID_BYTES)
        return found if found.pages or found.partial else None

    def _descend(
        self, node: Node, ids: bytes | bytearray, limit: int, *, whole_pages: bool = False
    ) -> Match:
        """Follow ``ids[:limit]`` down from the end of ``node``. ``whole_pages``: look for no page
        to copy from."""
        page_bytes, position = self.page_bytes, 0
        pages: list[int] = []
        keys: list[bytes] = []
        while position + page_bytes <= limit:
            first_page = bytes(ids[position : position + page_bytes])
            at = bisect_left(node.child_ids, first_page)
            if at == len(node.child_ids) or node.child_ids[at] != first_page:
                break
            node = node.children[at]
            if position + len(node.ids) <= limit and ids.startswith(node.ids, position):
                pages += node.pages
                keys += node.keys
                position += len(node.ids)
                continue
            matching = common_tokens(node.ids, ids, position) * ID_BYTES
            whole, rest = divmod(min(matching, limit - position), page_bytes)
            partial = None
            if rest and not whole_pages:
                page, key = node.pages[whole], node.keys[whole]
                partial = PartialPage(node, page, rest // ID_BYTES, key)
            return Match(node, whole, pages + node.pages[:whole], keys + node.keys[:whole], partial)
        partial = None
        if node.children and not whole_pages:
            tail = bytes(ids[position : min(limit, position + page_bytes)])
            partial = self._best_child(node, tail)
        return Match(node, len(node.pages), pages, keys, partial)

    @staticmethod
    def _best_child(node: Node, ids: bytes) -> PartialPage | None:
        """The child whose first page shares most tokens with ``ids``: one of two neighbours."""
        at = bisect_left(node.child_ids, ids)
        best: PartialPage | None = None
        for neighbour in range(max(at - 1, 0), min(at + 1, len(node.children))):
            num_tokens = common_tokens(node.child_ids[neighbour], ids)
            if num_tokens > (best.num_tokens if best else 0):
                child = node.children[neighbour]
                best = PartialPage(child, child.pages[0], num_tokens, child.keys[0])
        return best

    # --- lock --------------------------------------------------------------------------------
    def lock_match(self, match: Match) -> Node:
        """Lock exactly the whole pages that match. Returns the node to unlock later."""
        node = self._cut(match)
        self.lock(node)
        return node

    def lock_root(self, namespace: Namespace) -> Node:
        """Lock a namespace's root, made on first use."""
        root = self.roots.get(namespace)
        if root is None:
            root = Node(bytearray(), [], [self._root_key(namespace)], None, namespace)
            self.roots[namespace] = root
        self.lock(root)
        return root

    def lock(self, node: Node, below: Node | None = None) -> None:
        """Protect ``node``'s path, down from (and without) the ancestor ``below``."""
        for member in node.path():
            if member is below:
                return
            if member.refs == 0 and member.parent is not None:
                self.order.hold(member)
                self.num_locked_pages += len(member.pages)
            member.refs += 1

    def unlock(self, node: Node, now: float) -> None:
        """Take one lock off ``node``'s path."""
        for member in node.path():
            member.refs -= 1
            if member.parent is None:
                continue
            self.order.touch(member)
            if member.refs:
                self.order.hold(member)
            else:
                member.last_used = now
                self.num_locked_pages -= len(member.pages)
        self._drop_if_bare(member)

    def _cut(self, match: Match) -> Node:
        """A node that ends where the match ends; splits the one the match ends inside of.

        The lower half stays the same object, so that locks on it stay valid. The caller locks the
        upper half next.
        """
        node, count = match.node, match.num_node_pages
        parent = node.parent
        if count == len(node.pages) or parent is None:
            return node
        self.version += 1
        edge = count * self.page_bytes
        upper = Node(node.ids[:edge], node.pages[:count], node.keys[:count], parent)
        upper.refs, upper.last_used = node.refs, node.last_used
        parent.children[self._place(parent, node)] = upper
        del node.ids[:edge], node.pages[:count], node.keys[:count]
        node.parent = upper
        upper.children, upper.child_ids = [node], [self._first_page(node)]
        self.order.inherit(upper, node)
        return upper

    # --- insert ------------------------------------------------------------------------------
    def insert(self, node: Node, ids: bytes | bytearray, pages: list[int]) -> Inserted:
        """Append whole pages after ``node``, on which the caller has a lock.

        The lock moves to the end of the chain. Pages whose ids the tree holds already are not
        taken: there the chain runs through the tree's own pages.
        """
        found = self._descend(node, ids, len(ids), whole_pages=True)
        end, present = self._cut(found), len(found.pages)
        dropped: list[int] = []
        if present < len(pages):
            self.version += 1
            new_ids, new_pages = bytearray(ids[present * self.page_bytes :]), pages[present:]
            keys = self._chain(end.keys[-1], new_ids)
            if end is node and self._may_grow(node):
                node.ids += new_ids
                node.pages += new_pages
                node.keys += keys
                self.num_locked_pages += len(new_pages)
                self.num_pages += len(new_pages)
            else:
                child = Node(new_ids, new_pages, keys, end)
                dropped = self._attach(child, end)
                end = child
        self.lock(end, below=node)
        return Inserted(end, present, dropped)

    def insert_partial(self, node: Node, ids: bytes, page: int, now: float) -> Inserted | None:
        """Hang a page that is not full under ``node``, unlocked. None if nothing is gained."""
        best = self._best_child(node, ids)
        if best is not None and best.num_tokens * ID_BYTES == len(ids):
            return None
        leaf = Node(bytearray(ids), [page], self._chain(node.keys[-1], ids), node, last_used=now)
        dropped = self._attach(leaf, node)
        self.order.touch(leaf)
        return Inserted(leaf, 0, dropped)

    def replace(
        self, node: Node, ids: bytes, bad: Container[int], pages: list[int]
    ) -> list[tuple[int, int, bytes]]:
        """Where the whole pages of ``ids`` after ``node`` are in the tree and in ``bad``, put those
        of ``pages`` in their place. Returns what went, what came, and its key."""
        found = self._descend(node, ids, len(ids), whole_pages=True)
        swaps = [
            (old, new, key)
            for old, new, key in zip(found.pages, pages, found.keys, strict=False)
            if old in bad
        ]
        renamed = {old: new for old, new, _ in swaps}
        self.version += len(swaps)
        for member in found.node.path() if swaps else ():
            member.pages[:] = [renamed.get(page, page) for page in member.pages]
        return swaps

    @staticmethod
    def last_keys(node: Node, count: int) -> list[bytes]:
        """Keys of the last ``count`` pages that end with ``node``, its root's included."""
        keys: list[bytes] = []
        for member in node.path():
            keys[:0] = member.keys
            if len(keys) >= count:
                break
        return keys[-count:]

    def root_key(self, namespace: Namespace) -> bytes:
        """Where a namespace's chains start."""
        root = self.roots.get(namespace)
        return self._root_key(namespace) if root is None else root.keys[0]

    @staticmethod
    def _may_grow(node: Node) -> bool:
        """Whether ``node`` can take more pages itself: no root, no branch, one lock only.

        A second holder would otherwise protect pages that it does not use.
        """
        return node.parent is not None and not node.children and node.refs == 1

    def _attach(self, child: Node, parent: Node) -> list[int]:
        """Hang ``child`` under ``parent`` and drop the partial leaves that it covers."""
        self.version += 1
        first_page = self._first_page(child)
        dropped: list[int] = []
        at = bisect_left(parent.child_ids, first_page)
        while at > 0 and first_page.startswith(parent.child_ids[at - 1]):
            covered = parent.children[at - 1]
            if covered.refs:
                break
            dropped += covered.pages
            self._remove(covered)
            at -= 1
        parent.child_ids.insert(at, first_page)
        parent.children.insert(at, child)
        self.num_pages += len(child.pages)
        return dropped

    def _chain(self, key: bytes, ids: bytes | bytearray) -> list[bytes]:
        """Keys of the pages that hold ``ids``, after the page called ``key``."""
        keys = []
        for start in range(0, len(ids), self.page_bytes):
            key = chain_key(key, bytes(ids[start : start + self.page_bytes]), self.hash_function)
            keys.append(key)
        return keys

    # --- evict -------------------------------------------------------------------------------
    def evict(self, num_pages: int) -> list[Evicted]:
        """Take up to ``num_pages`` pages out, in the policy's order, ends of chains first."""
        evicted = []
        self.version += 1
        while num_pages > 0:
            node = next(self.order.candidates(), None)
            if node is None:
                break
            count = min(num_pages, len(node.pages))
            evicted.append(Evicted(node.pages[-count:], node.last_used))
            if count == len(node.pages):
                self._remove(node)
            else:
                del node.pages[-count:], node.keys[-count:], node.ids[-count * self.page_bytes :]
                self.num_pages -= count
            num_pages -= count
        return evicted

    def reset(self) -> None:
        """Forget everything, whatever state it is in. Locks are void."""
        self.version += 1
        self.roots.clear()
        self.order = make_policy(self._policy, 0)
        self.num_pages = self.num_locked_pages = 0

    def clear(self, namespace: Namespace) -> list[int]:
        """Forget a namespace, locked or not. Locks on it are void. Returns its pages."""
        self.version += 1
        pages: list[int] = []
        for node in self.roots.pop(namespace).subtree():
            pages += node.pages
            self.order.discard(node)
            if node.refs:
                self.num_locked_pages -= len(node.pages)
        self.num_pages -= len(pages)
        return pages

    def _remove(self, leaf: Node) -> None:
        """Take an unlocked leaf out."""
        parent = leaf.parent
        assert parent is not None
        at = self._place(parent, leaf)
        del parent.child_ids[at], parent.children[at]
        self.order.discard(leaf)
        self.num_pages -= len(leaf.pages)
        self._drop_if_bare(parent)

    def _drop_if_bare(self, node: Node) -> None:
        """Forget a root without pages and locks, so that namespaces do not pile up."""
        if node.namespace is not None and not node.children and node.refs == 0:
            del self.roots[node.namespace]

    def _first_page(self, node: Node) -> bytes:
        return bytes(node.ids[: self.page_bytes])

    def _place(self, parent: Node, child: Node) -> int:
        return bisect_left(parent.child_ids, self._first_page(child))
