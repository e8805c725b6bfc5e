"""Rotation and store in one launch, against the two launches that it replaces, bit for bit."""

from __future__ import annotations

import pytest
import torch
from support.device import DEVICE, decode_step

from bicl.attention.cuda import CudaBackend
from bicl.attention.pool import LayerCache
from bicl.attention.rotary import Rotary
from bicl.cache.layout import PageLayout
from bicl.ops.cuda import library
from bicl.ops.cuda.rotary import rotate
from bicl.sparse.index import make_indexes

pytestmark = pytest.mark.gpu

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
PAGES = 6


def projected(tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(tokens)
    shape = (tokens, heads + 2 * kv_heads, dim)
    return torch.randn(shape, device=DEVICE, generator=generator).to(dtype)


def angles(tokens: int, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    turns = torch.arange(tokens * size, device=DEVICE).view(tokens, size) * 0.37
    return turns.cos().to(dtype), turns.sin().to(dtype)


def layer_of(layout: PageLayout) -> LayerCache:
    pages = torch.zeros(layout.shape(PAGES), dtype=layout.dtype, device=DEVICE)
    return LayerCache(pages, layout)


def one_launch(layer: LayerCache, rows, cos, sin, slots) -> bool:
    """Whether the rows fit the kernel, which then stored them."""
    query, key, value = rows
    return library.module().rotate_and_store(
        query, key, value, cos, sin, layer.pages, slots, layer.layout.page_size, True
    )


@pytest.mark.parametrize("tokens", [1, 3, 130, 1000])
@pytest.mark.parametrize(
    ("layout", "heads", "rotary"),
    [
        (PageLayout(8, 128, BF16), 32, 128),
        (PageLayout(2, 128, FP16), 14, 64),
        (PageLayout(3, 64, BF16), 9, 64),
        (PageLayout(2, 96, BF16, 32, 32), 4, 96),
        (PageLayout(1, 256, FP16), 8, 32),
        (PageLayout(2, 128, BF16, 64, 32), 4, 128),
    ],
    ids=str,
)
def test_it_equals_rotation_and_store(layout, heads: int, rotary: int, tokens: int) -> None:
    kv_heads, dim = layout.num_kv_heads, layout.head_dim
    qkv = projected(tokens, heads, kv_heads, dim, layout.dtype)
    cos, sin = angles(tokens, rotary, layout.dtype)
    room = PAGES * layout.page_size
    slots = torch.randperm(room, device=DEVICE)[:tokens] if tokens <= room else None
    if slots is None:
        slots = torch.arange(tokens, device=DEVICE) % room
        slots[:-room] = -1
    slots[tokens // 2 : tokens // 2 + 1] = -1 if tokens > 1 else 5
    own, other = layer_of(layout), layer_of(layout)
    parts = [heads, kv_heads, kv_heads]
    expected = torch.split(qkv.clone(), parts, dim=1)
    rotate(expected[0], expected[1], cos, sin)
    CudaBackend().store(other, expected[1], expected[2], slots)
    rows = torch.split(qkv, parts, dim=1)
    assert one_launch(own, rows, cos, sin, slots)
    assert torch.equal(rows[0], expected[0])
    assert torch.equal(own.pages, other.pages)


@pytest.mark.parametrize(
    ("layout", "heads", "rotary"),
    [
        (PageLayout(8, 128, BF16), 32, 128),
        (PageLayout(2, 128, FP16), 14, 64),
        (PageLayout(2, 96, BF16, 32, 32), 4, 96),
        (PageLayout(1, 256, FP16), 8, 32),
        (PageLayout(2, 128, BF16, 64, 32), 4, 128),
        (PageLayout(2, 128, FP8), 4, 128),
        (PageLayout(2, 80, BF16), 4, 80),
    ],
    ids=str,
)
def test_it_also_indexes_the_pages_that_it_completes(layout, heads: int, rotary: int) -> None:
    """In one launch or, the last two, in two; against three."""
    kv_heads, size = layout.num_kv_heads, layout.page_size
    dtype = layout.dtype if layout.dtype.itemsize == 2 else BF16
    slots = torch.tensor([size - 1, size, 3 * size - 1, -1, 5 * size - 2], device=DEVICE)
    layers = [layer_of(layout), layer_of(layout)]
    indexes = [make_indexes({0: layer}, "centroids", dtype)[0] for layer in layers]
    earlier = projected(PAGES * size, 1, kv_heads, layout.head_dim, dtype)
    backend = CudaBackend()
    for layer, index in zip(layers, indexes, strict=True):
        places = torch.arange(PAGES * size, device=DEVICE)
        backend.store(layer, earlier[:, 1 : 1 + kv_heads], earlier[:, 1 + kv_heads :], places)
        index.vectors.fill_(7)
    qkv = projected(len(slots), heads, kv_heads, layout.head_dim, dtype)
    cos, sin = angles(len(slots), rotary, dtype)
    query, key, value = torch.split(qkv.clone(), [heads, kv_heads, kv_heads], dim=1)
    rotate(query, key, cos, sin)
    backend.store(layers[1], key, value, slots, records=indexes[1].vectors)
    rows = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
    turned = Rotary(rows[0], cos, sin)
    backend.store(layers[0], rows[1], rows[2], slots, rotary=turned, records=indexes[0].vectors)
    assert torch.equal(rows[0], query)
    assert torch.equal(layers[0].pages.view(torch.uint8), layers[1].pages.view(torch.uint8))
    assert torch.equal(indexes[0].vectors, indexes[1].vectors)
    changed = (indexes[0].vectors != 7).any(dim=1).nonzero().flatten()
    assert changed.tolist() == [0, 2], "pages that these tokens complete"


@pytest.mark.parametrize("case", ["fp8", "padded", "rotary dims", "rows not aligned", "float32"])
def test_what_does_not_fit_is_left_alone_and_done_in_two_launches(case: str) -> None:
    page_dtype = FP8 if case == "fp8" else torch.float32 if case == "float32" else BF16
    dtype = torch.float32 if case == "float32" else BF16
    layout = PageLayout(2, 80 if case == "padded" else 128, page_dtype)
    dim = layout.head_dim
    qkv = projected(7, 4, 2, dim + (case == "rows not aligned"), dtype)[..., -dim:]
    cos, sin = angles(7, 24 if case == "rotary dims" else 64, dtype)
    slots = torch.arange(7, device=DEVICE)
    rows = torch.split(qkv, [4, 2, 2], dim=1)
    before = [part.clone() for part in rows]
    own, other = layer_of(layout), layer_of(layout)
    assert not one_launch(own, rows, cos, sin, slots)
    assert all(torch.equal(a, b) for a, b in zip(rows, before, strict=True))
    if case == "float32":
        return  # such a model has no rotation of ours
    backend = CudaBackend()
    backend.store(own, rows[1], rows[2], slots, rotary=Rotary(rows[0], cos, sin))
    rotate(before[0], before[1], cos, sin)
    backend.store(other, before[1], before[2], slots)
    assert torch.equal(rows[0], before[0])
    assert torch.equal(own.pages.view(torch.uint8), other.pages.view(torch.uint8))


@pytest.mark.parametrize("lengths", [[1], [700], [65, 1, 300, 4000], [129] * 40], ids=str)
def test_attention_behind_it_reads_what_it_wrote(lengths: list[int]) -> None:
    """Attention starts while it still runs: queries and newest keys are its own. From a graph."""
    backend = CudaBackend()
    step = decode_step(backend, lengths, PageLayout(8, 128, BF16), group=4, dtype=BF16)
    batch = len(lengths)
    qkv = projected(batch, 32, 8, 128, BF16)
    cos, sin = angles(batch, 128, BF16)
    slots, layer = step.meta.slot_mapping, step.layer
    expected = torch.split(qkv.clone(), [32, 8, 8], dim=1)
    rotate(expected[0], expected[1], cos, sin)
    backend.store(layer, expected[1], expected[2], slots)
    torch.cuda.synchronize()
    backend.plan(step.meta)
    truth = backend.run(expected[0].clone(), layer, step.meta, scale=0.1)
    work = qkv.clone()

    def one_step() -> torch.Tensor:
        work.copy_(qkv)
        backend.store(layer, torch.zeros_like(work[:, 32:40]), work[:, 40:], slots)  # spoilt
        backend.plan(step.meta)
        for _ in range(2):  # the second one finds the plan
            work.copy_(qkv)
            query, key, value = torch.split(work, [32, 8, 8], dim=1)
            backend.store(layer, key, value, slots, rotary=Rotary(query, cos, sin))
            out = backend.run(query, layer, step.meta, scale=0.1)
        return out

    one_step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = one_step()
    for _ in range(20):
        out.zero_()
        graph.replay()
        assert torch.equal(out, truth)
