"""Chosen tokens side by side in other pages, against the CPU operator."""

from __future__ import annotations

import pytest
import torch
from support.cases import PAGES_AND_TILES
from support.device import as_stored, decode_step
from support.sparse import STORED

from bicl.attention.cuda import CudaBackend
from bicl.attention.pool import LayerCache
from bicl.cache.layout import PageLayout
from bicl.ops.cpu.compact_tokens import compact_tokens as compact_on_cpu
from bicl.ops.cuda.compact_tokens import compact_tokens

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("page_and_tile", PAGES_AND_TILES)
def test_compacted_tokens_lie_side_by_side(
    backend: CudaBackend, stored: str, page_and_tile: tuple[int, int]
) -> None:
    dtype, kept_as = STORED[stored]
    layout = PageLayout(3, 96, kept_as, *page_and_tile)
    step = decode_step(backend, [1000, 700], layout, dtype=dtype)
    order = [torch.randperm(700)[:333].sort().values for _ in range(3)]
    positions = torch.stack(order).to("cuda", torch.int32)
    size = layout.page_size
    pages = torch.randperm(12)[: -(-333 // size)].to("cuda", torch.int32)
    fresh = torch.zeros(layout.shape(12)).to(kept_as)
    target = LayerCache(fresh.cuda(), layout)
    compact_tokens(step.layer, step.meta.page_table[1], positions, target, pages)
    on_cpu = LayerCache(fresh.clone(), layout)
    compact_on_cpu(
        LayerCache(step.layer.pages.cpu(), layout),
        step.meta.page_table[1].cpu(),
        positions.cpu(),
        on_cpu,
        pages.cpu(),
    )
    moved = target.pages.cpu().view(torch.uint8)
    assert torch.equal(moved, on_cpu.pages.view(torch.uint8))
    key, value = as_stored(step)
    if kept_as.itemsize == 1:
        return
    got = backend.gather(target, pages[None], torch.tensor([333], dtype=torch.int32, device="cuda"))
    for rows, wanted in zip(got, (key, value), strict=True):
        for head in range(3):
            expected = wanted[1000:][positions[head].long(), head]
            assert torch.equal(rows[:, head].float(), expected)
