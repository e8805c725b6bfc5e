"""gather and copy_pages on the GPU."""

from __future__ import annotations

import math

import pytest
import torch
from support.cases import FP8_DTYPES, PAGES_AND_TILES, build_step
from support.device import DEVICE

from bicl.attention import reference
from bicl.attention.cuda import CudaBackend
from bicl.attention.pool import KVPool, LayerCache
from bicl.cache.layout import PageLayout
from bicl.errors import InvalidInputError

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, *FP8_DTYPES], ids=str)
@pytest.mark.parametrize("page_and_tile", PAGES_AND_TILES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 100, 128])
def test_gathered_rows_equal_the_reference(
    backend: CudaBackend, head_dim: int, page_and_tile: tuple[int, int], stored: torch.dtype
) -> None:
    layout = PageLayout(3, head_dim, stored, *page_and_tile)
    dtype = torch.float16 if stored.itemsize == 1 else stored
    lengths = [(1, n) for n in (70, 0, 33, 129)]
    step = build_step(lengths, layout, dtype=dtype, device=DEVICE, k_scale=0.5, v_scale=2.0)
    got = backend.gather(step.layer, step.meta.page_table, step.meta.cache_seqlens)
    on_cpu = build_step(lengths, layout, dtype=dtype, k_scale=0.5, v_scale=2.0)
    truth = reference.gather(on_cpu.layer, on_cpu.meta.page_table, on_cpu.meta.cache_seqlens)
    factors = (1.0, 1.0) if stored.itemsize == 1 else (0.5, 2.0)  # scales are for fp8 only
    for ours, theirs, factor in zip(got, truth, factors, strict=True):
        assert torch.equal(ours.cpu().float() * factor, theirs)


def test_pages_are_copied_in_every_layer(backend: CudaBackend) -> None:
    layouts = [
        PageLayout(2, 128, torch.bfloat16),
        PageLayout(2, 96, torch.bfloat16, tile=32),
        PageLayout(8, 256, torch.bfloat16),
    ]
    pool = KVPool(layouts, 9, "cuda")
    for layer in pool.layers:
        layer.pages.view(torch.int16).random_()
    before = [layer.pages.clone() for layer in pool.layers]
    source = torch.tensor([1, 4, 8, 1], device="cuda")
    target = torch.tensor([0, 7, 3, 5], device="cuda")
    for _ in range(2):
        backend.copy_pages(pool.layers, source, target)
    for layer, pages in zip(pool.layers, before, strict=True):
        pages[target] = pages[source]
        assert torch.equal(layer.pages.view(torch.int16), pages.view(torch.int16))


def test_pools_above_two_billion_elements(backend: CudaBackend) -> None:
    """Stored, copied and gathered past 2**31 elements, page 0 as it was. (A24, A43)"""
    layout = PageLayout(8, 128, torch.float16)
    num_pages = (1 << 31) // (layout.page_bytes // 2) + 3
    if torch.cuda.mem_get_info()[0] < num_pages * layout.page_bytes * 1.1:
        pytest.skip("needs 5 GB of free device memory")
    pages = torch.empty(layout.shape(num_pages), dtype=torch.float16, device="cuda")
    pages[:1].zero_()
    pages[-2:] = math.nan
    layer = LayerCache(pages, layout)
    key, value = torch.randn(2, 64, 8, 128, device="cuda").half()
    last = num_pages - 1
    backend.store(layer, key, value, torch.arange(64, device="cuda") + last * 64)
    ids = torch.tensor([last], device="cuda")
    backend.copy_pages([layer], ids, ids - 1)
    for page in (last, last - 1):
        table = torch.tensor([[page]], dtype=torch.int32, device="cuda")
        length = torch.tensor([64], dtype=torch.int32, device="cuda")
        for got, put in zip(backend.gather(layer, table, length), (key, value), strict=True):
            assert torch.equal(got, put)
    assert bool((pages[0] == 0).all())


def test_copying_no_pages_is_no_error(backend: CudaBackend) -> None:
    pool = KVPool([PageLayout(1, 64, torch.float16)], 2, "cuda", fill=1.0)
    none = torch.empty(0, dtype=torch.int64, device="cuda")
    backend.copy_pages(pool.layers, none, none)
    assert (pool.layers[0].pages == 1).all()


def test_page_ids_of_the_wrong_dtype_are_refused(backend: CudaBackend) -> None:
    pool = KVPool([PageLayout(1, 64, torch.float16)], 2, "cuda")
    ids = torch.zeros(1, dtype=torch.int32, device="cuda")
    with pytest.raises(InvalidInputError, match="source must be int64"):
        backend.copy_pages(pool.layers, ids, ids)
