"""store_kv against the reference, byte for byte, over whole pools."""

from __future__ import annotations

import math

import pytest
import torch
from support.cases import FP8_DTYPES, PAGES_AND_TILES, pairwise

from bicl.attention import reference
from bicl.attention.cuda import CudaBackend
from bicl.attention.pool import KVPool, LayerCache
from bicl.cache.layout import PageLayout
from bicl.errors import InvalidInputError

pytestmark = pytest.mark.gpu

DTYPES = [
    *((d, d) for d in (torch.float32, torch.float16, torch.bfloat16)),
    *((d, f) for d in (torch.float32, torch.float16, torch.bfloat16) for f in FP8_DTYPES),
]
CASES = list(
    pairwise(
        dtypes=DTYPES,
        head_dim=(64, 80, 96, 100, 128, 192, 256),
        page_and_tile=PAGES_AND_TILES,
        kv_heads=(1, 3, 8),
        tokens=(1, 33, 150),
        rows=("contiguous", "slices of a fused qkv", "odd strides"),
    )
)
NUM_PAGES = 8


def rows_of(kind: str, tokens: int, heads: int, dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """K and V rows ``[tokens, heads, dim]`` as models hand them over."""
    if kind == "contiguous":
        return [torch.randn(tokens, heads, dim).to(dtype).cuda() for _ in range(2)]
    if kind == "slices of a fused qkv":
        qkv = torch.randn(tokens, 4 * heads * dim).to(dtype).cuda()
        return [
            qkv[:, (2 + i) * heads * dim : (3 + i) * heads * dim].view(tokens, heads, dim)
            for i in range(2)
        ]
    wide = torch.randn(2, tokens, heads, dim + 1).to(dtype).cuda()
    return [wide[0, ..., 1:], wide[1, ..., :-1]]


def layer_of(layout: PageLayout, device: str, k_scale: float, v_scale: float) -> LayerCache:
    pages = KVPool([layout], NUM_PAGES, device, fill=math.nan).layers[0].pages
    return LayerCache(pages, layout, k_scale, v_scale)


def as_bytes(layer: LayerCache) -> torch.Tensor:
    return layer.pages.cpu().view(torch.uint8)


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(str(v) for v in c.values()))
def test_stored_pages_equal_the_reference_bit_for_bit(
    backend: CudaBackend, case: dict[str, object]
) -> None:
    dtype, stored = case["dtypes"]
    page_size, tile = case["page_and_tile"]
    layout = PageLayout(case["kv_heads"], case["head_dim"], stored, page_size, tile)
    scales = (0.37, 1.9) if stored in FP8_DTYPES else (1.0, 1.0)
    ours, truth = layer_of(layout, "cuda", *scales), layer_of(layout, "cpu", *scales)
    tokens = case["tokens"]
    key, value = rows_of(case["rows"], tokens, case["kv_heads"], case["head_dim"], dtype)
    key[0, 0, :2] = torch.tensor([6e4, -6e4])  # saturates in fp8
    slots = torch.randperm(NUM_PAGES * page_size)[:tokens]
    slots[tokens // 2 :: 5] = -1
    backend.store(ours, key, value, slots.cuda())
    reference.store(truth, key.cpu(), value.cpu(), slots)
    assert torch.equal(as_bytes(ours), as_bytes(truth))


def test_a_row_can_be_rewritten_without_touching_its_neighbours(backend: CudaBackend) -> None:
    layout = PageLayout(2, 128, torch.bfloat16)
    layer = layer_of(layout, "cuda", 1.0, 1.0)
    slots = torch.arange(64, device="cuda")
    key, value = rows_of("contiguous", 64, 2, 128, torch.bfloat16)
    backend.store(layer, key, value, slots)
    new_key, new_value = rows_of("contiguous", 1, 2, 128, torch.bfloat16)
    backend.store(layer, new_key, new_value, slots[5:6])
    key[5], value[5] = new_key[0], new_value[0]
    table = torch.zeros(1, 1, dtype=torch.int32, device="cuda")
    got = backend.gather(layer, table, torch.tensor([64], dtype=torch.int32, device="cuda"))
    assert torch.equal(got[0], key)
    assert torch.equal(got[1], value)


def test_repeated_slots_hold_one_of_the_rows_whole(backend: CudaBackend) -> None:
    layout = PageLayout(1, 64, torch.float16)
    layer = layer_of(layout, "cuda", 1.0, 1.0)
    key = torch.arange(300, device="cuda").half().view(-1, 1, 1).expand(-1, 1, 64).contiguous()
    backend.store(layer, key, key, torch.zeros(300, dtype=torch.int64, device="cuda"))
    table = torch.zeros(1, 1, dtype=torch.int32, device="cuda")
    one = torch.ones(1, dtype=torch.int32, device="cuda")
    got, _ = backend.gather(layer, table, one)
    assert (got == got[0, 0, 0]).all()


def test_no_tokens_is_no_error(backend: CudaBackend) -> None:
    layer = layer_of(PageLayout(1, 64, torch.float16), "cuda", 1.0, 1.0)
    rows = torch.empty(0, 1, 64, dtype=torch.float16, device="cuda")
    backend.store(layer, rows, rows, torch.empty(0, dtype=torch.int64, device="cuda"))
    assert layer.pages.isnan().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": torch.zeros(2, 3, 64)}, "key has shape"),
        ({"value": torch.zeros(3, 2, 64)}, "value has shape"),
        ({"slots": torch.zeros(2, dtype=torch.int32)}, "slots must be int64"),
        ({"key": torch.zeros(2, 2, 64, dtype=torch.float32)}, "dtype"),
    ],
    ids=["heads", "tokens", "slot dtype", "row dtype"],
)
def test_wrong_rows_are_refused_by_name(
    backend: CudaBackend, change: dict[str, torch.Tensor], message: str
) -> None:
    layer = layer_of(PageLayout(2, 64, torch.float16), "cuda", 1.0, 1.0)
    rows = torch.zeros(2, 2, 64, dtype=torch.float16)
    slots = torch.zeros(2, dtype=torch.int64)
    given = {"key": rows, "value": rows, "slots": slots} | change
    if change.get("key") is not None and change["key"].shape[1] == 3:
        given["key"] = given["key"].half()
    with pytest.raises(InvalidInputError, match=message):
        backend.store(layer, *(given[n].cuda() for n in ("key", "value", "slots")))
