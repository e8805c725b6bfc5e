"""Pages between a GPU's pool and page-locked host memory, beside the computation."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from bicl.attention.transfer import make_mover
from bicl.cache.keys import Namespace, PageChain, root_key
from bicl.cache.tiers import PageTiers, PageTwins

pytestmark = pytest.mark.gpu

NUM_PAGES = 64
LAYERS = 4
PAGE = 64
SHAPE = (NUM_PAGES, 8, 2, 2, 64, 64)


@pytest.fixture
def layers() -> list[list[torch.Tensor]]:
    """Pages, and on every second layer a smaller tensor beside them."""
    made = []
    for number in range(LAYERS):
        pages = torch.full(SHAPE, torch.nan, dtype=torch.bfloat16, device="cuda")
        beside = torch.zeros(NUM_PAGES, 8, 3, dtype=torch.bfloat16, device="cuda")
        made.append([pages, beside] if number % 2 else [pages])
    return made


@pytest.fixture
def tiers(layers) -> Iterator[PageTiers]:
    made = PageTiers(
        make_mover(layers), PAGE, fingerprint=b"gpu", host_bytes=256 << 20, pinned=True
    )
    yield made
    made.close()
    assert made.check_integrity()


def chain(pages: int, seed: int = 0) -> PageChain:
    ids = torch.randint(0, 1000, (pages * PAGE,), generator=torch.Generator().manual_seed(seed))
    return PageChain(ids.tolist(), PAGE, [root_key(Namespace())])


def fill(layers, pages: list[int], seed: int = 0) -> list[list[torch.Tensor]]:
    torch.manual_seed(seed)
    for tensors in layers:
        for tensor in tensors:
            shape = (len(pages), *tensor.shape[1:])
            tensor[pages] = torch.randn(shape, dtype=tensor.dtype, device="cuda")
    return [[tensor[pages].clone() for tensor in tensors] for tensors in layers]


def assert_holds(layers, pages: list[int], contents) -> None:
    for tensors, held in zip(layers, contents, strict=True):
        for tensor, rows in zip(tensors, held, strict=True):
            assert torch.equal(tensor[pages], rows)


def wipe(layers, pages: list[int]) -> None:
    for tensors in layers:
        for tensor in tensors:
            tensor[pages] = torch.nan


def test_pages_come_back_bit_for_bit(layers, tiers) -> None:
    prompt, pages = chain(40), list(range(40))
    held = fill(layers, pages)
    tiers.save(prompt, pages)
    assert tiers.settle(30)
    wipe(layers, pages)
    there = list(range(63, 23, -1))
    fetch = tiers.reserve(prompt, 0, 40).start(there)
    for layer in range(LAYERS):
        fetch.join(layer)
        assert_holds(layers[layer : layer + 1], there, held[layer : layer + 1])
    assert fetch.wait(30)
    assert tiers.stats().exposed_seconds >= 0


def test_save_reads_what_was_issued_before_it_and_nothing_after(layers, tiers) -> None:
    """The step that fills the pages still runs when they are saved, and the next owner's writes
    are issued while the copy waits for it."""
    prompt, pages = chain(8), list(range(8))
    held = fill(layers, pages, seed=1)
    wipe(layers, pages)
    torch.cuda._sleep(200_000_000)
    for tensors, rows in zip(layers, held, strict=True):
        for tensor, row in zip(tensors, rows, strict=True):
            tensor[pages] = row
    tiers.save(prompt, pages)
    with tiers._changed:  # the copies are issued, but wait for the device
        assert tiers._changed.wait_for(
            lambda: all(batch.copy for batch in tiers._saves._by_page.values()), 30
        )
    tiers.claim(pages)
    wipe(layers, pages)
    assert tiers.settle(30)
    there = list(range(20, 28))
    fetch = tiers.reserve(prompt, 0, 8).start(there)
    fetch.join_all(LAYERS)
    assert_holds(layers, there, held)


def test_fetch_does_not_overtake_what_reads_the_pages(layers, tiers) -> None:
    """Pages are handed out while an earlier step still reads them."""
    prompt, pages = chain(8), list(range(8))
    held = fill(layers, pages, seed=2)
    tiers.save(prompt, pages)
    assert tiers.settle(30)
    there = list(range(30, 38))
    old = fill(layers, there, seed=3)
    torch.cuda._sleep(200_000_000)
    read = [[tensor[there].clone() for tensor in tensors] for tensors in layers]
    fetch = tiers.reserve(prompt, 0, 8).start(there)
    fetch.join_all(LAYERS)
    assert_holds(layers, there, held)
    for tensors, expected in zip(read, old, strict=True):
        for tensor, rows in zip(tensors, expected, strict=True):
            assert torch.equal(tensor, rows)


def test_cancelled_fetch_settles_before_its_pages_are_free(layers, tiers) -> None:
    """(A33)"""
    prompt, pages = chain(8), list(range(8))
    fill(layers, pages)
    tiers.save(prompt, pages)
    assert tiers.settle(30)
    torch.cuda._sleep(400_000_000)
    fetch = tiers.reserve(prompt, 0, 8).start(list(range(30, 38)))
    fetch.cancel()
    assert fetch.wait(30)
    torch.cuda.synchronize()
    assert tiers.check_integrity()
    assert threading.active_count() < 50


def test_pages_of_two_groups_come_back_to_their_twins(layers) -> None:
    """Odd layers have pages of their own."""
    odd = range(1, LAYERS, 2)
    twins = PageTwins(NUM_PAGES, NUM_PAGES, odd)
    both = PageTiers(
        make_mover(layers, twins), PAGE, fingerprint=b"gpu", host_bytes=256 << 20, pinned=True
    )
    prompt, pages, others = chain(8), list(range(8)), list(range(40, 48))
    held = fill(layers, pages)
    for number in odd:
        for tensor in layers[number]:
            tensor[others] = tensor[pages]
            tensor[pages] = torch.nan
    twins.pair(pages, others)
    both.save(prompt, pages)
    both.claim(twins.owners(others), finish=True)
    wipe(layers, [*pages, *others])
    assert both.settle(30)
    there, beside = list(range(20, 28)), list(range(8))
    twins.pair(there, beside)
    fetch = both.reserve(prompt, 0, 8).start(there)
    fetch.join_all(LAYERS)
    for number in range(LAYERS):
        places = beside if number in odd else there
        assert_holds(layers[number : number + 1], places, held[number : number + 1])
    assert fetch.wait(30)
    both.close()
