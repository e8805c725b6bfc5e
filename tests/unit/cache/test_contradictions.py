"""Bookkeeping that contradicts itself is found, and begun anew. Pages of 64 tokens."""

from __future__ import annotations

import pytest
from simulated_pool import SimulatedPool

from bicl.cache.keys import Namespace
from bicl.cache.manager import CacheManager
from bicl.errors import IntegrityError, InvalidInputError

PAGE = 64


def tokens(count: int, start: int = 1000) -> list[int]:
    return list(range(start, start + count))


def leaf_of(pool: SimulatedPool):
    (root,) = pool.manager._index.roots.values()
    return root.children[0]


def forget_key(pool: SimulatedPool) -> None:
    leaf_of(pool).keys.pop()


def empty_node(pool: SimulatedPool) -> None:
    leaf = leaf_of(pool)
    leaf.pages, leaf.keys, leaf.ids = [], [], bytearray()


def lose_ids(pool: SimulatedPool) -> None:
    del leaf_of(pool).ids[-8:]


def lock_too_often(pool: SimulatedPool) -> None:
    pool.manager._index.lock(leaf_of(pool))


def forget_lock(pool: SimulatedPool) -> None:
    pool.start(tokens(129)).seq._node = None


def lose_child(pool: SimulatedPool) -> None:
    root = leaf_of(pool).parent
    root.children, root.child_ids = [], []


def misname_child(pool: SimulatedPool) -> None:
    root = leaf_of(pool).parent
    root.child_ids[0] = b"\0" * 512


def adopt_child(pool: SimulatedPool) -> None:
    leaf_of(pool).parent = leaf_of(pool)


def queue_parent_first(pool: SimulatedPool) -> None:
    pool.serve([*tokens(64), *([7] * 64)], [])
    leaf = leaf_of(pool)
    for child in leaf.children or [leaf]:
        pool.manager._index.order.touch(child)


def forget_in_queue(pool: SimulatedPool) -> None:
    pool.manager._index.order.discard(leaf_of(pool))


def miscount_pages(pool: SimulatedPool) -> None:
    pool.manager._index.num_pages += 1


def miscount_locked(pool: SimulatedPool) -> None:
    pool.manager._index.num_locked_pages -= 1


def drop_reference(pool: SimulatedPool) -> None:
    pool.manager._allocator.release(leaf_of(pool).pages)


def extra_reference(pool: SimulatedPool) -> None:
    pool.manager._allocator.retain(leaf_of(pool).pages)


def index_page_twice(pool: SimulatedPool) -> None:
    leaf = leaf_of(pool)
    leaf.pages[1] = leaf.pages[0]


def forget_sequence(pool: SimulatedPool) -> None:
    pool.start(tokens(300, start=9000))
    pool.manager._live.clear()


def swap_namespace(pool: SimulatedPool) -> None:
    roots = pool.manager._index.roots
    roots[Namespace(salt="thief")] = roots.pop(Namespace())


@pytest.mark.parametrize(
    ("spoil", "contradiction"),
    [
        (forget_key, "keys and pages differ"),
        (empty_node, "differ|without pages"),
        (lose_ids, "do not fit"),
        (lock_too_often, "wrong lock count"),
        (forget_lock, "wrong lock count"),
        (lose_child, "bare"),
        (misname_child, "children and their ids differ"),
        (adopt_child, "astray"),
        (queue_parent_first, "queued before a child"),
        (forget_in_queue, "eviction queue"),
        (miscount_pages, "are counted"),
        (miscount_locked, "locked pages"),
        (drop_reference, "held 0 times, accounted for 1"),
        (extra_reference, "held 2 times, accounted for 1"),
        (index_page_twice, "in the index twice"),
        (forget_sequence, "lock count"),
        (swap_namespace, "root of another"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_spoilt_bookkeeping_is_found(spoil, contradiction: str) -> None:  # A23
    pool = SimulatedPool(CacheManager(16, PAGE))
    pool.serve(tokens(128), [])
    pool.manager.check_integrity()
    spoil(pool)
    with pytest.raises(IntegrityError, match=contradiction):
        pool.manager.check_integrity()
    if pool.manager._live:  # whose pages nobody can tell any more
        with pytest.raises(InvalidInputError, match="live"):
            pool.manager.rebuild()
        return
    pool.manager.rebuild()
    pool.manager.check_integrity()
    assert pool.manager.gauges().free_pages == 16
    assert pool.manager.stats.rebuilds == 1
    assert pool.serve(tokens(128), []) == 0
    assert pool.serve([*tokens(128), 9], []) == 128
    pool.manager.check_integrity()
