"""Compacting tokens on the CPU."""

from __future__ import annotations

import pytest
import torch
from support.cases import FP8_DTYPES, PAGES_AND_TILES, build_step

from bicl.attention import reference
from bicl.attention.pool import KVPool
from bicl.cache.layout import PageLayout
from bicl.errors import InvalidInputError
from bicl.ops.cpu.compact_tokens import compact_tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8_DTYPES[0]])
@pytest.mark.parametrize(("page_size", "tile"), PAGES_AND_TILES)
@pytest.mark.parametrize("swizzle", [True, False])
def test_each_head_gets_its_own_tokens_side_by_side(
    dtype: torch.dtype, page_size: int, tile: int, swizzle: bool
) -> None:
    layout = PageLayout(3, 96, dtype, page_size, tile, swizzle=swizzle)
    step = build_step([(1, 200), (1, 333)], layout)
    generator = torch.Generator().manual_seed(1)
    chosen = [torch.randperm(333, generator=generator)[:150].sort().values for _ in range(3)]
    positions = torch.stack(chosen).int()
    target = KVPool([layout], 8, "cpu", fill=0.0).layers[0]
    pages = torch.randperm(8, generator=generator)[: -(-150 // page_size)].int()
    compact_tokens(step.layer, step.meta.page_table[1], positions, target, pages)

    tokens = torch.tensor([333], dtype=torch.int32)
    before = reference.gather(step.layer, step.meta.page_table[1:], tokens)
    after = reference.gather(target, pages[None], torch.tensor([150], dtype=torch.int32))
    for whole, compacted in zip(before, after, strict=True):
        for head in range(3):
            assert torch.equal(compacted[:, head], whole[positions[head].long(), head])


def test_too_few_target_pages_are_refused() -> None:
    layout = PageLayout(1, 64, torch.float32)
    step = build_step([(1, 200)], layout)
    target = KVPool([layout], 4, "cpu").layers[0]
    positions = torch.arange(130, dtype=torch.int32)[None]
    with pytest.raises(InvalidInputError, match="130 tokens need 3 pages; target_pages has 2"):
        compact_tokens(
            step.layer,
            step.meta.page_table[0],
            positions,
            target,
            torch.arange(2, dtype=torch.int32),
        )


def test_another_layout_is_refused() -> None:
    source = KVPool([PageLayout(1, 64, torch.float32)], 4, "cpu").layers[0]
    target = KVPool([PageLayout(1, 64, torch.float16)], 4, "cpu").layers[0]
    one = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(InvalidInputError, match="one layout"):
        compact_tokens(source, one, one[None], target, one)
