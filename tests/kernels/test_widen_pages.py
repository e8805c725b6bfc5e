"""fp8 pages as 16-bit ones, value by value, and prefill steps that are served by them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from support.cases import FP8_DTYPES, PAGES_AND_TILES, Step
from support.compare import assert_close_enough, assert_lse_close
from support.device import DEVICE, truth_of
from support.prefill import check_replays, packed_step

from bicl.attention.cuda import CudaBackend
from bicl.attention.pool import LayerCache
from bicl.attention.widening import PageWidener
from bicl.cache.layout import PageLayout
from bicl.ops.cuda.widen_pages import widen_pages

pytestmark = pytest.mark.gpu

LONG = ((300, 1500), (1, 700), (0, 50), (777, 777))
GROUP = 4
SCALES = {"k_scale": 0.7, "v_scale": 1.3}


def backend_with(room_bytes: int = 1 << 26, **options: bool) -> CudaBackend:
    backend = CudaBackend(**options)
    backend._widener = PageWidener(room_bytes=room_bytes, pdl=True, **options)
    return backend


def attend(
    backend: CudaBackend, step: Step, **options: object
) -> tuple[torch.Tensor, torch.Tensor]:
    backend.plan(step.meta)
    out, lse = backend.run(step.query, step.layer, step.meta, return_lse=True, **options)  # type: ignore[arg-type]
    return out, lse


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("page_and_tile", PAGES_AND_TILES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stored", FP8_DTYPES, ids=str)
def test_every_byte_becomes_the_number_it_stands_for(
    stored: torch.dtype, dtype: torch.dtype, page_and_tile: tuple[int, int], head_dim: int
) -> None:
    """All 256 of them, NaN and infinities too; two of five heads, pages in any order."""
    source = PageLayout(5, head_dim, stored, *page_and_tile)
    wide = PageLayout(2, head_dim, dtype, *page_and_tile)
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 256, source.shape(9), dtype=torch.uint8, generator=generator)
    size = source.page_size
    lengths = [3 * size, 0, 1, 2 * size + 1]
    table = torch.full((4, 5), 10**9, dtype=torch.int32)
    owned = torch.randperm(9, generator=generator).to(torch.int32).split([3, 1, 3, 2])
    for row, pages in ((0, owned[0]), (2, owned[1]), (3, owned[2])):
        table[row, : len(pages)] = pages
    target = torch.full(wide.shape(4 * 4 + 1), 7.0, dtype=dtype, device=DEVICE)
    widen_pages(
        LayerCache(raw.view(stored).to(DEVICE), source, **SCALES),
        LayerCache(target, wide),
        table.to(DEVICE),
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        first_head=2,
        pages_per_sequence=4,
    )
    planes = source.page_size * source.padded_head_dim
    order_from = torch.from_numpy(source.plane_offsets.copy()).flatten()
    order_to = torch.from_numpy(wide.plane_offsets.copy()).flatten()
    got = target.cpu().view(-1, 2, 2, planes)[..., order_to].float()
    numbers = raw.view(stored).float().view(9, 5, 2, planes)[:, 2:4][..., order_from]
    expected = torch.full_like(got, 7.0)
    for row, length in enumerate(lengths):
        for page in range(source.pages_for(length)):
            expected[row * 4 + page] = numbers[table[row, page]]
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("room_heads", [8, 4, 1])
@pytest.mark.parametrize("window_left", [-1, 200])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stored", FP8_DTYPES, ids=str)
def test_widened_steps_err_at_most_twice_as_much_as_torch(
    stored: torch.dtype, dtype: torch.dtype, head_dim: int, window_left: int, room_heads: int
) -> None:
    """KV heads all at once, in two turns, one by one: the room has just the space."""
    tile = (32, 32) if head_dim == 80 else (64, 64)
    layout = PageLayout(8, head_dim, stored, *tile)
    step = packed_step(LONG, layout, group=GROUP, dtype=dtype, **SCALES)
    pages = len(LONG) * layout.pages_for(step.meta.max_k)
    backend = backend_with(pages * 2 * layout.head_page_bytes * room_heads)
    parts = list(backend._widener.parts(step.query, step.layer, step.meta))
    assert [part.layer.layout.num_kv_heads for part in parts] == [room_heads] * (8 // room_heads)
    scale = head_dim**-0.5
    truth = truth_of(step, scale=scale, window_left=window_left)
    for _ in range(2):  # layers share the room
        out, lse = attend(backend, step, scale=scale, window_left=window_left)
        assert_close_enough(out, truth.out, truth.same_precision)
        assert_lse_close(lse, truth.lse)
    assert backend._widener.num_too_large == 0


def test_widened_pages_give_the_bits_of_16_bit_pages_with_the_same_values() -> None:
    narrow = PageLayout(2, 128, torch.float8_e4m3fn)
    step = packed_step(((1000, 3000), (500, 500)), narrow, group=GROUP, dtype=torch.bfloat16)
    same = replace(narrow, dtype=torch.bfloat16)
    pages = torch.full(same.shape(step.layer.num_pages), math.nan, device=DEVICE).bfloat16()
    exact = replace(step, layer=LayerCache(pages, same))
    CudaBackend().store(
        exact.layer,
        step.key.to(narrow.dtype).bfloat16(),
        step.value.to(narrow.dtype).bfloat16(),
        step.slots,
    )
    for one, other in zip(
        attend(backend_with(), step, scale=0.09), attend(CudaBackend(), exact, scale=0.09),
        strict=True,
    ):  # fmt: skip
        assert torch.equal(one, other)


def test_steps_that_gain_nothing_or_do_not_fit_read_the_cache_itself(
    caplog: pytest.LogCaptureFixture,
) -> None:
    layout = PageLayout(2, 128, torch.float8_e4m3fn)
    long = packed_step(LONG, layout, group=GROUP, dtype=torch.bfloat16)
    short = packed_step(((20, 900), (3, 40)), layout, group=GROUP, dtype=torch.bfloat16)
    cases = (
        (backend_with(), short, 0),
        (backend_with(deterministic=True), long, 0),
        (backend_with(room_bytes=1 << 20), long, 1),
    )
    for backend, step, too_large in cases:
        (part,) = backend._widener.parts(step.query, step.layer, step.meta)
        assert part.layer is step.layer
        assert backend._widener.num_too_large == too_large
        truth = truth_of(step, scale=0.1)
        out, _ = attend(backend, step, scale=0.1)
        assert_close_enough(out, truth.out, truth.same_precision)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "one KV head" in caplog.text


def test_a_captured_graph_widens_other_lengths() -> None:
    layout = PageLayout(2, 128, torch.float8_e4m3fn)
    step = packed_step(LONG, layout, group=GROUP, dtype=torch.bfloat16, **SCALES)
    check_replays(backend_with(), step, scale=0.1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"first_head": 1}, "heads 1 to 3 are not among the source's 2"),
        ({"first_head": -1}, "heads -1"),
        ({"pages_per_sequence": 6}, "the page table has 5"),
        ({"pages_per_sequence": 5}, "2 sequences of 5 pages do not fit the target's 9"),
    ],
)
def test_what_does_not_fit_is_named(wrong: dict[str, int], message: str) -> None:
    source = PageLayout(2, 64, torch.float8_e4m3fn)
    wide = replace(source, dtype=torch.float16)
    pages = torch.zeros(source.shape(9), dtype=torch.uint8, device=DEVICE).view(source.dtype)
    table = torch.zeros(2, 5, dtype=torch.int32, device=DEVICE)
    given = {"first_head": 0, "pages_per_sequence": 4} | wrong
    with pytest.raises(ValueError, match=message):
        widen_pages(
            LayerCache(pages, source),
            LayerCache(torch.zeros(wide.shape(9), device=DEVICE).half(), wide),
            table,
            torch.zeros(2, dtype=torch.int32, device=DEVICE),
            **given,
        )
