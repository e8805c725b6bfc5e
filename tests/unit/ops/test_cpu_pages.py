"""store_kv, gather_kv and copy_pages on the CPU, byte for byte against the reference."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import FP8_DTYPES, PAGES_AND_TILES, QUERY_DTYPES, build_step

from bicl.attention import reference
from bicl.attention.cpu import CpuBackend
from bicl.attention.pool import KVPool, LayerCache
from bicl.attention.rotary import Rotary
from bicl.cache.layout import SUPPORTED_DTYPES, PageLayout
from bicl.ops.cpu import rotate


def as_bytes(layer: LayerCache) -> torch.Tensor:
    return layer.pages.view(torch.uint8)


def twins(layout: PageLayout, pages: int = 4, **scales: float) -> tuple[LayerCache, LayerCache]:
    """Two equal layers, NaN everywhere."""
    pools = [KVPool([layout], pages, "cpu", fill=math.nan) for _ in range(2)]
    first, second = (LayerCache(pool.layers[0].pages, layout, **scales) for pool in pools)
    return first, second


@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
@pytest.mark.parametrize("swizzle", [False, True])
@pytest.mark.parametrize(("page_size", "tile"), PAGES_AND_TILES)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_store_writes_the_bytes_of_the_reference(
    head_dim: int, page_size: int, tile: int, swizzle: bool, dtype: torch.dtype
) -> None:
    """(A48)"""
    layout = PageLayout(3, head_dim, dtype, page_size=page_size, tile=tile, swizzle=swizzle)
    fast, slow = twins(layout)
    slots = torch.randperm(4 * page_size)[:50]
    slots[7] = -1
    slots[30] = -5
    key, value = torch.randn(2, 50, 3, head_dim)
    CpuBackend().store(fast, key, value, slots)
    reference.store(slow, key, value, slots)
    assert torch.equal(as_bytes(fast), as_bytes(slow))


@settings(max_examples=25, deadline=None)
@given(
    head_dim=st.integers(1, 200),
    heads=st.integers(1, 4),
    shape=st.sampled_from(PAGES_AND_TILES),
    swizzle=st.booleans(),
    dtype=st.sampled_from(SUPPORTED_DTYPES),
    tokens=st.integers(0, 40),
    seed=st.integers(0, 3),
)
def test_gather_gives_back_what_store_took(
    head_dim: int,
    heads: int,
    shape: tuple[int, int],
    swizzle: bool,
    dtype: torch.dtype,
    tokens: int,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    page_size, tile = shape
    layout = PageLayout(heads, head_dim, dtype, page_size=page_size, tile=tile, swizzle=swizzle)
    layer, _ = twins(layout)
    backend = CpuBackend()
    key, value = torch.randn(2, tokens, heads, head_dim).to(dtype).float()
    first = tokens // 2
    page = torch.tensor([[2, -9], [3, 10**9]], dtype=torch.int32)
    lengths = torch.tensor([first, tokens - first], dtype=torch.int32)
    slots = torch.cat(
        [2 * page_size + torch.arange(first), 3 * page_size + torch.arange(tokens - first)]
    )
    backend.store(layer, key, value, slots)
    got_key, got_value = backend.gather(layer, page, lengths)
    assert torch.equal(got_key.float(), key)
    assert torch.equal(got_value.float(), value)


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
def test_fp8_store_saturates_and_scales(dtype: torch.dtype) -> None:
    layout = PageLayout(1, 64, dtype, swizzle=False)
    layer, _ = twins(layout, k_scale=0.5, v_scale=4.0)
    limit = torch.finfo(dtype).max
    row = torch.zeros(1, 1, 64)
    row[0, 0, :4] = torch.tensor([limit, -10 * limit, math.inf, 1.0])
    CpuBackend().store(layer, row, row, torch.tensor([0]))
    table, length = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    key, value = CpuBackend().gather(layer, table, length)
    assert key[0, 0, :4].tolist() == [limit * 0.5, -limit * 0.5, limit * 0.5, 1.0]
    assert value[0, 0, 1:4].tolist() == [-limit * 4, limit * 4, 1.0]


@pytest.mark.parametrize("source", QUERY_DTYPES, ids=str)
@pytest.mark.parametrize("target", SUPPORTED_DTYPES, ids=str)
def test_store_converts_any_row_dtype(source: torch.dtype, target: torch.dtype) -> None:
    layout = PageLayout(2, 64, target)
    fast, slow = twins(layout)
    key, value = torch.randn(2, 5, 2, 64).to(source)
    slots = torch.arange(5) + 60
    CpuBackend().store(fast, key, value, slots)
    reference.store(slow, key, value, slots)
    assert torch.equal(as_bytes(fast), as_bytes(slow))


def test_store_touches_its_own_rows_only() -> None:
    layout = PageLayout(2, 80, torch.bfloat16)
    layer, before = twins(layout)
    key, value = torch.randn(2, 1, 2, 80)
    CpuBackend().store(layer, key, value, torch.tensor([2 * 64 + 63]))
    changed = (as_bytes(layer) != as_bytes(before)).flatten(1).any(1)
    assert changed.tolist() == [False, False, True, False]
    assert int((~layer.pages.isnan()).sum()) == 2 * 2 * layout.padded_head_dim


def test_repeated_slot_holds_one_of_its_rows() -> None:
    """Padding of graphs writes slot 0 many times."""
    layer, _ = twins(PageLayout(2, 64, torch.float32, swizzle=False))
    key = torch.arange(4.0)[:, None, None].expand(4, 2, 64)
    CpuBackend().store(layer, key, key, torch.zeros(4, dtype=torch.int64))
    table, length = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    got, _ = CpuBackend().gather(layer, table, length)
    assert got.unique().numel() == 1
    assert got.flatten()[0].item() in (0.0, 1.0, 2.0, 3.0)


def test_store_of_nothing_writes_nothing() -> None:
    layer, _ = twins(PageLayout(2, 64, torch.float32))
    empty = torch.empty(0, 2, 64)
    CpuBackend().store(layer, empty, empty, torch.empty(0, dtype=torch.int64))
    rows = torch.randn(3, 2, 64)
    CpuBackend().store(layer, rows, rows, torch.full((3,), -1))
    assert layer.pages.isnan().all()


def test_store_of_a_planned_step_equals_a_store_by_hand() -> None:
    layout = PageLayout(2, 64, torch.float32, swizzle=False)
    planned, by_hand = (build_step([(5, 70), (1, 3)], layout, filled=False) for _ in range(2))
    rows = torch.randn(6, 2, 64)
    backend = CpuBackend()
    backend.plan(planned.meta)
    backend.store(planned.layer, rows, rows, planned.meta.slot_mapping)
    CpuBackend().store(by_hand.layer, rows, rows, by_hand.meta.slot_mapping.clone())
    assert torch.equal(as_bytes(planned.layer), as_bytes(by_hand.layer))


@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
def test_copied_pages_are_equal_bytes_in_every_layer(dtype: torch.dtype) -> None:
    layouts = [PageLayout(2, 64, dtype, tile=64), PageLayout(1, 128, dtype, tile=32)]
    pool = KVPool(layouts, 6, "cpu")
    for layer in pool.layers:
        as_bytes(layer).random_(0, 256)
    before = [as_bytes(layer).clone() for layer in pool.layers]
    CpuBackend().copy_pages(pool.layers, torch.tensor([0, 5]), torch.tensor([3, 0]))
    for layer, old in zip(pool.layers, before, strict=True):
        now = as_bytes(layer)
        assert torch.equal(now[3], old[0])
        assert torch.equal(now[0], old[5])
        for page in (1, 2, 4, 5):
            assert torch.equal(now[page], old[page])


def test_keys_are_turned_on_their_way_to_the_pages() -> None:
    layout = PageLayout(2, 64, torch.float32)
    one, other = (LayerCache(torch.zeros(layout.shape(2)), layout) for _ in range(2))
    query, key, value = torch.randn(5, 4, 64), torch.randn(5, 2, 64), torch.randn(5, 2, 64)
    turns, slots = torch.randn(5, 64), torch.tensor([3, -1, 70, 0, 5])
    turned = query.clone(), key.clone()
    rotate(*turned, turns.cos(), turns.sin())
    CpuBackend().store(other, turned[1], value, slots)
    CpuBackend().store(one, key, value, slots, rotary=Rotary(query, turns.cos(), turns.sin()))
    assert torch.equal(query, turned[0])
    assert torch.equal(one.pages, other.pages)
