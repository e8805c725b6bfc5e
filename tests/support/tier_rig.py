"""A pool on the CPU with tiers below it, for the tests of the tiers."""

from __future__ import annotations

import threading

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


def blocked(one: Rig, monkeypatch, method: str, layer: int = 0) -> threading.Event:
    """Copies from that layer on wait until the event is set."""
    release, original = threading.Event(), getattr(one.mover, method)

    def waits(*arguments):
        if method == "save" or arguments[0] >= layer:
            assert release.wait(20)
        return original(*arguments)

    monkeypatch.setattr(one.mover, method, waits)
    return release
