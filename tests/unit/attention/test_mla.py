"""Latent attention on the CPU: the twin against the formula, pages, refusals."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.compare import assert_close_enough, assert_lse_close
from support.latent import latent_step, truth_of

from bicl.attention.mla import LATENT_DIM, VALUE_DIM, LatentAttention, latent_layout
from bicl.attention.pool import KVPool, LayerCache
from bicl.cache.layout import PageLayout
from bicl.errors import BackendError, InvalidInputError, UnsupportedError
from bicl.ops.cpu.latent import latent_rows

SCALE = 0.07


@pytest.fixture
def attention() -> LatentAttention:
    return LatentAttention("cpu", max_batch=8, num_heads=32)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 2, 63, 64, 65, 127, 200]), min_size=1, max_size=4),
    heads=st.sampled_from([1, 3, 16]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    swizzle=st.booleans(),
    seed=st.integers(0, 99),
)
def test_decode_equals_the_formula(
    lengths: list[int], heads: int, dtype: torch.dtype, swizzle: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    attention = LatentAttention("cpu", max_batch=8, num_heads=32)
    step = latent_step(attention, lengths, dtype, heads=heads, swizzle=swizzle)
    got, lse = attention.decode(
        *(step.query, step.layer, step.page_table, step.cache_seqlens),
        scale=SCALE,
        return_lse=True,
    )
    out, true_lse, same = truth_of(step, SCALE)
    assert_close_enough(got, out, same)
    assert_lse_close(lse, true_lse)
    for i, length in enumerate(lengths):
        assert length or not got[i].any()


@settings(max_examples=25, deadline=None)
@given(
    slots=st.lists(st.integers(0, 4 * 64 - 1), unique=True, max_size=40),
    skipped=st.integers(0, 3),
    swizzle=st.booleans(),
)
def test_what_is_stored_comes_back_and_nothing_else_changes(
    slots: list[int], skipped: int, swizzle: bool
) -> None:
    attention = LatentAttention("cpu", max_batch=1, num_heads=1)
    layout = latent_layout(torch.bfloat16, swizzle=swizzle)
    layer = KVPool([layout], 4, "cpu", fill=math.nan).layers[0]
    places = torch.tensor([*slots, *[-1] * skipped], dtype=torch.int64)
    rows = torch.randn(len(places), LATENT_DIM).bfloat16()
    attention.store(layer, rows, places)
    back = latent_rows(layer.pages, layout, places[: len(slots)])
    assert torch.equal(back, rows[: len(slots)])
    assert int(layer.pages.isnan().sum()) == layer.pages.numel() - len(slots) * LATENT_DIM


def test_a_page_holds_a_latent_where_the_layout_says(attention: LatentAttention) -> None:
    layout = latent_layout(torch.float16)
    layer = KVPool([layout], 2, "cpu", fill=0.0).layers[0]
    row = torch.arange(1, LATENT_DIM + 1).half()
    attention.store(layer, row[None], torch.tensor([64 + 13]))
    flat = layer.pages.view(-1)
    for dim in (0, 7, 8, 63, 64, 511, 512, 575):
        assert flat[layout.element_offset(64 + 13, 0, 0, dim)] == dim + 1


def test_out_is_filled_and_returned(attention: LatentAttention) -> None:
    step = latent_step(attention, [70, 3], torch.float32)
    arguments = step.query, step.layer, step.page_table, step.cache_seqlens
    out = torch.full((2, 16, VALUE_DIM), math.nan)
    assert attention.decode(*arguments, scale=SCALE, out=out) is out
    assert torch.equal(out, attention.decode(*arguments, scale=SCALE))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(2, 16, 512)}, "query must have shape"),
        ({"query": torch.zeros(2, 16, LATENT_DIM, dtype=torch.float16)}, "query must be float32"),
        ({"query": torch.zeros(2, 33, LATENT_DIM)}, "33 heads"),
        ({"query": torch.zeros(2, 0, LATENT_DIM)}, "0 heads"),
        ({"query": torch.zeros(3, 16, LATENT_DIM)}, "query must have shape"),
        ({"page_table": torch.zeros(2, 2)}, "page_table must be int32"),
        ({"page_table": torch.full((2, 2), 9, dtype=torch.int32)}, "outside the pool"),
        ({"cache_seqlens": torch.tensor([1, -1], dtype=torch.int32)}, "must lie in 0..128"),
        ({"cache_seqlens": torch.tensor([1, 129], dtype=torch.int32)}, "must lie in 0..128"),
        ({"out": torch.zeros(2, 16, LATENT_DIM)}, "out must have shape"),
        ({"scale": 0.0}, "scale is 0.0"),
        ({"scale": math.nan}, "scale is nan"),
    ],
)
def test_bad_calls_are_refused(
    attention: LatentAttention, change: dict[str, object], message: str
) -> None:
    step = latent_step(attention, [70, 128], torch.float32)
    arguments: dict[str, object] = {
        "query": step.query,
        "layer": step.layer,
        "page_table": step.page_table,
        "cache_seqlens": step.cache_seqlens,
        "scale": SCALE,
    }
    with pytest.raises(InvalidInputError, match=message):
        attention.decode(**(arguments | change))  # type: ignore[arg-type]


def test_more_sequences_than_announced_are_refused() -> None:
    attention = LatentAttention("cpu", max_batch=1, num_heads=16)
    step = latent_step(attention, [1, 1], torch.float32)
    with pytest.raises(InvalidInputError, match="2 sequences"):
        attention.decode(step.query, step.layer, step.page_table, step.cache_seqlens, scale=1.0)


def test_rows_that_do_not_fit_are_refused(attention: LatentAttention) -> None:
    layer = KVPool([latent_layout(torch.float32)], 1, "cpu").layers[0]
    slots = torch.tensor([0])
    with pytest.raises(InvalidInputError, match="latent must have shape"):
        attention.store(layer, torch.zeros(1, 512), slots)
    with pytest.raises(InvalidInputError, match="latent must be float32"):
        attention.store(layer, torch.zeros(1, LATENT_DIM).half(), slots)
    with pytest.raises(InvalidInputError, match="slot 64 is outside the pool"):
        attention.store(layer, torch.zeros(1, LATENT_DIM), slots + 64)
    with pytest.raises(UnsupportedError, match="no backward"):
        attention.store(layer, torch.zeros(1, LATENT_DIM, requires_grad=True), slots)


@pytest.mark.parametrize(
    "layout",
    [
        PageLayout(1, 576, torch.float32),
        PageLayout(1, 512, torch.float32, planes=1),
        replace(latent_layout(torch.float32), page_size=32, tile=32),
    ],
)
def test_other_pages_are_refused(attention: LatentAttention, layout: PageLayout) -> None:
    layer = KVPool([layout], 1, "cpu").layers[0]
    with pytest.raises(InvalidInputError, match="latent_layout"):
        attention.store(layer, torch.zeros(1, LATENT_DIM), torch.tensor([0]))


def test_pages_of_another_shape_are_refused(attention: LatentAttention) -> None:
    layout = latent_layout(torch.float32)
    layer = LayerCache(torch.zeros(3, 9, 64, 64), layout)
    with pytest.raises(InvalidInputError, match="pages must have shape"):
        attention.store(layer, torch.zeros(1, LATENT_DIM), torch.tensor([0]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch": 0, "num_heads": 16}, "max_batch is 0"),
        ({"max_batch": 2048, "num_heads": 16}, "max_batch is 2048"),
        ({"max_batch": 1, "num_heads": 0}, "num_heads is 0"),
    ],
)
def test_impossible_sizes_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        LatentAttention("cpu", **options)


def test_other_devices_are_refused() -> None:
    with pytest.raises(BackendError, match="not on meta"):
        LatentAttention("meta", max_batch=1, num_heads=1)
