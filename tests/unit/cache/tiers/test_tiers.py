"""Pages leave the pool for host memory and disk, and come back as they were, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from bicl.cache.keys import Namespace, PageChain, root_key
from bicl.cache.tiers import HostMover, PageTiers

PAGE = 4
LAYERS = 3
NUM_PAGES = 16
LAYER_SHAPE = (NUM_PAGES, 2, PAGE, 8)
PAGE_BYTES = LAYERS * 2 * PAGE * 8 * 4
MEBI = 1 << 20


def chain(tokens: int, *, seed: int = 0, salt: str = "", group: str = "") -> PageChain:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 1000, (tokens,), generator=generator).tolist()
    return PageChain(ids, PAGE, [root_key(Namespace(salt, group))], group=group)


class Rig:
    """A pool on the CPU with tiers below it."""

    def __init__(self, **options) -> None:
        self.layers = [torch.full(LAYER_SHAPE, torch.nan) for _ in range(LAYERS)]
        self.mover = HostMover([[layer] for layer in self.layers])
        self.tiers = PageTiers(
            self.mover, PAGE, **{"fingerprint": b"model", "host_bytes": MEBI, **options}
        )

    def fill(self, pages: list[int], seed: int = 7) -> list[torch.Tensor]:
        """Write pages; returns what they hold."""
        generator = torch.Generator().manual_seed(seed)
        for layer in self.layers:
            layer[pages] = torch.randn(len(pages), *LAYER_SHAPE[1:], generator=generator)
        return [layer[pages].clone() for layer in self.layers]

    def save(self, chain: PageChain, pages: list[int], seed: int = 7) -> list[torch.Tensor]:
        held = self.fill(pages, seed)
        self.tiers.save(chain, pages)
        assert self.tiers.settle(10)
        for layer in self.layers:
            layer[pages] = torch.nan
        return held

    def fetch(self, chain: PageChain, pages: list[int], first: int = 0) -> int:
        """Bring what the host holds into these pages; returns how many came."""
        reservation = self.tiers.reserve(chain, first, chain.num_pages)
        count = reservation.num_pages
        fetch = reservation.start(pages[:count])
        fetch.join_all(LAYERS)
        assert fetch.wait(10)
        return count

    def promote(self, chain: PageChain, first: int = 0) -> None:
        promotion = self.tiers.promote(chain, first, chain.num_pages)
        if promotion is not None:
            assert promotion.wait(10)
            promotion.close()

    def holds(self, pages: list[int], contents: list[torch.Tensor]) -> bool:
        return all(
            torch.equal(layer[pages], held)
            for layer, held in zip(self.layers, contents, strict=True)
        )


@pytest.fixture
def rig() -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(**options) -> Rig:
        made.append(Rig(**options))
        return made[-1]

    yield make
    for one in made:
        one.tiers.close()
        assert one.tiers.check_integrity()


def test_pages_come_back_as_they_were(rig) -> None:
    one = rig()
    prompt = chain(5 * PAGE)
    held = one.save(prompt, [3, 1, 4, 5, 9])
    assert one.fetch(prompt, [2, 6, 10, 11, 12]) == 5
    assert one.holds([2, 6, 10, 11, 12], held)
    stats = one.tiers.stats()
    assert (stats.saved_pages, stats.loaded_pages, stats.host_pages) == (5, 5, 5)
    assert stats.saved_bytes == stats.loaded_bytes == 5 * PAGE_BYTES


def test_another_tenant_adapter_or_prompt_finds_nothing(rig) -> None:
    """(A11, A16, A17)"""
    one = rig()
    one.save(chain(3 * PAGE, salt="a"), [0, 1, 2])
    assert one.tiers.num_in_host(chain(3 * PAGE, salt="a"), 0, 3) == 3
    for other in ({"salt": "b"}, {}, {"salt": "a", "group": "lora"}, {"salt": "a", "seed": 1}):
        assert one.tiers.num_in_host(chain(3 * PAGE, **other), 0, 3) == 0


def test_equal_keys_with_other_tokens_are_no_hit(rig) -> None:
    """A hash that always says the same. (A13)"""
    one = rig()

    def constant(data: bytes) -> bytes:
        return bytes(32)

    first = PageChain([1] * PAGE, PAGE, [bytes(32)], hash_function=constant)
    second = PageChain([2] * PAGE, PAGE, [bytes(32)], hash_function=constant)
    one.save(first, [0])
    assert one.tiers.num_in_host(first, 0, 1) == 1
    assert one.tiers.num_in_host(second, 0, 1) == 0
