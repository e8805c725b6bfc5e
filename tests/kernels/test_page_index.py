"""The index of pages, made from stored keys or in the launch that stores them."""

from __future__ import annotations

import pytest
import torch
from support.cases import PAGES_AND_TILES
from support.device import as_stored
from support.sparse import LENGTHS, STORED, UNSET, indexed_step, unpadded

from bicl.attention.cuda import CudaBackend
from bicl.cache.layout import PageLayout
from bicl.ops.cpu import sparse as twin
from bicl.ops.cuda import sparse
from bicl.sparse.index import unpack_centroids

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("page_and_tile", PAGES_AND_TILES)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_full_pages_are_described_as_their_keys_lie(
    backend: CudaBackend, stored: str, page_and_tile: tuple[int, int], head_dim: int
) -> None:
    dtype, kept_as = STORED[stored]
    layout = PageLayout(3, head_dim, kept_as, *page_and_tile)
    scale = 0.5 if kept_as.itemsize == 1 else 1.0
    own = indexed_step(backend, LENGTHS["edges"], layout, dtype=dtype, k_scale=scale)
    key, size = as_stored(own.step)[0], layout.page_size
    full = {}
    for row, slot in enumerate(own.step.slots.tolist()):
        if slot % size == size - 1:
            full[slot // size] = key[row - size + 1 : row + 1]
    assert full
    vectors = own.index.vectors
    keys = torch.stack([page.transpose(0, 1) for page in full.values()]).float()
    found, wanted = vectors[list(full)], own.index.describe(keys)
    assert torch.equal(unpadded(found, layout), unpadded(wanted, layout))
    others = [page for page in range(len(vectors)) if page not in full]
    assert bool((vectors[others] == UNSET).all()), "a page that is not full was indexed"


def test_equal_keys_leave_clusters_empty_and_ties_go_to_the_earlier_key(
    backend: CudaBackend,
) -> None:
    """Small integers: every distance is exact, in float32 as in the twin."""
    layout = PageLayout(2, 64, torch.bfloat16, 64, 64)
    own = indexed_step(backend, [64 * 6], layout)
    generator = torch.Generator().manual_seed(3)
    keys = torch.randint(-1, 2, (6 * 64, 2, 64), generator=generator)
    keys[64:128] = 1  # one key, 64 times
    keys[128:192] = keys[128:130].repeat(32, 1, 1)  # two
    keys[192:256, :, 1:] = 0  # three at most, at equal distances
    rows = keys.bfloat16().cuda()
    backend.store(own.step.layer, rows, rows, own.step.slots)
    sparse.index_pages(own.step.layer, own.index, own.step.slots)
    pages = own.step.slots[63::64] // 64
    wanted = own.index.describe(rows.float().view(6, 64, 2, 64).transpose(1, 2))
    found = own.index.vectors[pages]
    assert torch.equal(unpadded(found, layout), unpadded(wanted, layout))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_rows_are_turned_where_dims_lie_far_out(backend: CudaBackend, head_dim: int) -> None:
    layout = PageLayout(2, head_dim, torch.bfloat16, 64, 64 if head_dim % 64 == 0 else 32)
    own = indexed_step(backend, [64 * 12], layout)
    rows = own.step.key.clone()
    rows[..., 5] += 60.0
    rows[..., head_dim - 3] -= 90.0
    backend.store(own.step.layer, rows, rows, own.step.slots)
    sparse.index_pages(own.step.layer, own.index, own.step.slots)
    keys = rows.float().view(12, 64, 2, head_dim).transpose(1, 2)
    found = own.index.vectors[own.step.slots[63::64] // 64]
    assert torch.equal(unpadded(found, layout), unpadded(own.index.describe(keys), layout))
    turned = unpack_centroids(found, layout)[..., :-2]
    rounded = (turned - twin.turned(twin.cluster_means(keys, 8)[..., :-2])).abs()
    assert float(rounded.max()) < (60 + 90) / 15 / 4, "half of what unturned rows are off by"


def test_slots_that_complete_no_page_or_are_skipped_touch_no_index_row(
    backend: CudaBackend,
) -> None:
    layout = PageLayout(2, 64, torch.bfloat16, 64, 64)
    own = indexed_step(backend, [200], layout)
    own.index.vectors.fill_(UNSET)
    slots = torch.tensor([-1, 0, 62, 64, -64, 126], device="cuda")
    sparse.index_pages(own.step.layer, own.index, slots)
    assert bool((own.index.vectors == UNSET).all())


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("page_and_tile", PAGES_AND_TILES)
@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_storing_a_step_indexes_the_pages_it_completes(
    backend: CudaBackend, stored: str, page_and_tile: tuple[int, int], head_dim: int
) -> None:
    """In one launch, bit for bit what two give."""
    dtype, kept_as = STORED[stored]
    layout = PageLayout(3, head_dim, kept_as, *page_and_tile)
    lengths = [64, 65, 640, 63, 1, 96, 1024]
    own = indexed_step(backend, lengths, layout, dtype=dtype)
    wanted_pages, wanted_records = own.step.layer.pages.clone(), own.index.vectors.clone()
    ends = torch.tensor(lengths).cumsum(0) - 1
    slots = own.step.slots[ends].clone()
    slots[1] = -1
    for slot in slots[slots >= 0].tolist():
        page, row = divmod(slot, layout.page_size)
        offsets = torch.from_numpy(layout.plane_offsets[row].copy()).cuda()
        raw = torch.uint8 if kept_as.itemsize == 1 else torch.int16
        own.step.layer.pages[page].view(raw).view(3, 2, -1)[:, :, offsets] = 0
        if row == layout.page_size - 1:
            own.index.vectors[page] = UNSET
    backend.store(
        own.step.layer,
        own.step.key[ends],
        own.step.value[ends],
        slots,
        records=own.index.vectors,
    )
    bits = own.step.layer.pages.view(torch.uint8)
    assert torch.equal(bits, wanted_pages.view(torch.uint8))
    assert torch.equal(own.index.vectors, wanted_records)
