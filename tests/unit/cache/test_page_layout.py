"""The page layout against a second, slower description of it, written bit by bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bicl.cache.layout import CHUNK_BYTES, SUPPORTED_DTYPES, PageLayout, z_order
from bicl.errors import ConfigError, LayoutError

SHAPES = [(64, 64), (64, 32), (32, 32)]
HEAD_DIMS = [16, 32, 64, 80, 96, 100, 120, 128, 160, 192, 256, 576]


def layouts(shape: tuple[int, int], dtype: torch.dtype) -> list[PageLayout]:
    """Every head_dim, swizzled and plain."""
    return [
        PageLayout(2, head_dim, dtype, *shape, swizzle=swizzle)
        for head_dim, swizzle in itertools.product(HEAD_DIMS, [True, False])
    ]


def each_kind(test):
    for_dtypes = pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
    return for_dtypes(pytest.mark.parametrize("shape", SHAPES, ids="P{0[0]}-T{0[1]}".format)(test))


# --- the second description ----------------------------------------------------------------------
def morton_bits(token_tile: int, dim_tile: int, token_bits: int, dim_bits: int) -> str:
    """The key as text, lowest bit last: d0, t0, d1, t1, ... while both last, then the longer."""
    token = [str(token_tile >> bit & 1) for bit in range(token_bits)]
    dim = [str(dim_tile >> bit & 1) for bit in range(dim_bits)]
    lowest_first: list[str] = []
    while token or dim:
        if dim:
            lowest_first.append(dim.pop(0))
        if token:
            lowest_first.append(token.pop(0))
    return "".join(reversed(lowest_first))


def brute_force_order(token_tiles: int, dim_tiles: int) -> dict[tuple[int, int], int]:
    token_bits, dim_bits = (token_tiles - 1).bit_length(), (dim_tiles - 1).bit_length()
    tiles = itertools.product(range(token_tiles), range(dim_tiles))
    ranked = sorted(tiles, key=lambda tile: morton_bits(*tile, token_bits, dim_bits))
    return {tile: rank for rank, tile in enumerate(ranked)}


def swizzled_byte(tile_byte: int, row_bytes: int) -> int:
    """The hardware's description: XOR address bits 4.. with the bits from 7 on.

    128-byte rows swap 3 bits, 64-byte rows 2, 32-byte rows 1. Rows of 256 bytes (float32, which
    no descriptor reads) take the row number's low 3 bits, so that 8 rows hit 8 bank groups.
    """
    if row_bytes == 256:
        return tile_byte ^ ((tile_byte >> 8 & 7) << 4)
    mask = row_bytes // CHUNK_BYTES - 1
    return tile_byte ^ ((tile_byte >> 7 & mask) << 4)


def element_places(layout: PageLayout) -> Iterator[tuple[int, int, int]]:
    """(token, dim, element offset in the plane), one element at a time."""
    tile, size = layout.tile, layout.dtype.itemsize
    order = brute_force_order(layout.page_size // tile, layout.padded_head_dim // tile)
    for token in range(layout.page_size):
        for dim in range(layout.padded_head_dim):
            byte = (token % tile * tile + dim % tile) * size
            if layout.swizzle:
                byte = swizzled_byte(byte, tile * size)
            yield token, dim, order[token // tile, dim // tile] * tile * tile + byte // size


# --- tiles ---------------------------------------------------------------------------------------
def test_z_order_of_four_by_four_is_the_familiar_curve() -> None:
    assert z_order(4, 4).tolist() == [
        [0, 1, 4, 5],
        [2, 3, 6, 7],
        [8, 9, 12, 13],
        [10, 11, 14, 15],
    ]


@given(st.integers(1, 9), st.integers(1, 20))
def test_z_order_equals_the_brute_force_table(token_tiles: int, dim_tiles: int) -> None:
    order = z_order(token_tiles, dim_tiles)
    expected = brute_force_order(token_tiles, dim_tiles)
    assert {tile: int(order[tile]) for tile in expected} == expected


def test_one_row_of_tiles_is_in_order() -> None:
    assert z_order(1, 9).tolist() == [list(range(9))]
    assert z_order(3, 1).tolist() == [[0], [1], [2]]


# --- planes --------------------------------------------------------------------------------------
@each_kind
def test_every_place_of_a_plane_is_used_once(shape, dtype) -> None:
    for layout in layouts(shape, dtype):
        offsets = layout.plane_offsets
        assert offsets.shape == (layout.page_size, layout.padded_head_dim)
        assert offsets.dtype == np.int64
        assert np.array_equal(np.sort(offsets.ravel()), np.arange(offsets.size)), layout


@each_kind
def test_tile_is_contiguous_and_its_rows_are_tokens(shape, dtype) -> None:
    for layout in layouts(shape, dtype):
        tile = layout.tile
        split = (layout.token_tiles, tile, layout.dim_tiles, tile)
        rows = layout.plane_offsets.reshape(split).transpose(0, 2, 1, 3) // tile
        first = rows[:, :, :1, :1]
        assert (first % tile == 0).all(), layout
        assert np.array_equal(rows - first, np.broadcast_to(np.c_[np.arange(tile)], rows.shape))


@each_kind
def test_chunks_of_sixteen_bytes_stay_whole_and_aligned(shape, dtype) -> None:
    for layout in layouts(shape, dtype):
        per_chunk = layout.chunk_elements
        chunks = layout.plane_offsets.reshape(layout.page_size, -1, per_chunk)
        assert (chunks[..., 0] % per_chunk == 0).all(), layout
        assert (np.diff(chunks, axis=-1) == 1).all(), layout


@each_kind
def test_places_equal_the_second_description(shape, dtype) -> None:
    for layout in layouts(shape, dtype):
        if layout.head_dim > 192:
            continue  # slow, and no other kind of shape
        expected = np.empty((layout.page_size, layout.padded_head_dim), dtype=np.int64)
        for token, dim, offset in element_places(layout):
            expected[token, dim] = offset
        assert np.array_equal(layout.plane_offsets, expected), layout


@pytest.mark.parametrize("tile", [32, 64])
@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
def test_eight_rows_of_one_column_meet_no_bank_twice(dtype: torch.dtype, tile: int) -> None:
    """What ldmatrix reads: the same chunk of 8 consecutive rows, in 8 different bank groups.

    Rows under 128 bytes share a line of banks, so the groups are counted by address.
    """
    layout = PageLayout(1, tile, dtype, tile, tile)
    row_bytes = tile * dtype.itemsize
    for chunk in range(row_bytes // CHUNK_BYTES):
        for first in range(0, tile, 8):
            groups = {
                (row * row_bytes // CHUNK_BYTES + layout.swizzle_chunk(row, chunk)) % 8
                for row in range(first, first + 8)
            }
            assert len(groups) == 8


@each_kind
def test_rows_come_back_as_they_were_stored(shape, dtype) -> None:
    for layout in layouts(shape, dtype):
        rows = np.random.default_rng(0).random((layout.page_size, layout.padded_head_dim))
        plane = np.full(rows.size, np.nan)
        plane[layout.plane_offsets] = rows
        assert np.array_equal(plane[layout.plane_offsets], rows), layout
        assert not np.isnan(plane).any(), layout


def test_offsets_cannot_be_changed_by_a_caller() -> None:
    layout = PageLayout(1, 64, torch.float16)
    with pytest.raises(ValueError, match="read-only"):
        layout.plane_offsets[0, 0] = 1


# --- pages and pools -----------------------------------------------------------------------------
@settings(max_examples=200)
@given(
    layout=st.builds(
        lambda shape, dim, heads, planes, dtype: PageLayout(heads, dim, dtype, *shape, planes),
        st.sampled_from(SHAPES),
        st.sampled_from([64, 96, 100]),
        st.integers(1, 3),
        st.integers(1, 2),
        st.sampled_from(SUPPORTED_DTYPES),
    ),
    data=st.data(),
)
def test_element_offset_is_the_flat_index_into_the_pool(layout: PageLayout, data) -> None:
    shape = layout.shape(5)
    page = data.draw(st.integers(0, 4))
    token = data.draw(st.integers(0, layout.page_size - 1))
    head = data.draw(st.integers(0, layout.num_kv_heads - 1))
    plane = data.draw(st.integers(0, layout.planes - 1))
    dim = data.draw(st.integers(0, layout.padded_head_dim - 1))
    inner = int(layout.plane_offsets[token, dim])
    tile, rest = divmod(inner, layout.tile**2)
    index = (page, head, plane, tile, *divmod(rest, layout.tile))
    slot = page * layout.page_size + token
    assert layout.element_offset(slot, head, plane, dim) == np.ravel_multi_index(index, shape)


@each_kind
def test_bytes_agree_with_the_pool_tensor(shape, dtype) -> None:
    for layout in layouts(shape, dtype):
        pool = torch.empty(layout.shape(3), dtype=dtype, device="meta")
        assert pool.nbytes == 3 * layout.page_bytes
        assert pool[0].nbytes == layout.page_bytes
        assert pool[0, 0].nbytes == layout.head_page_bytes
        assert pool[0, 0, 0, 0].nbytes == layout.tile_bytes
        assert layout.tile_bytes % 1024 == 0  # each tile starts a swizzle period


def test_known_sizes() -> None:
    """An 8B model: 32 KiB a head and page, 256 KiB a page and layer."""
    layout = PageLayout(8, 128, torch.float16)
    assert layout.head_page_bytes == 32 * 1024
    assert layout.page_bytes == 256 * 1024
    assert layout.shape(10) == (10, 8, 2, 2, 64, 64)


def test_latent_has_one_plane_of_nine_tiles() -> None:
    layout = PageLayout(1, 576, torch.bfloat16, planes=1)
    assert layout.shape(2) == (2, 1, 1, 9, 64, 64)
    assert layout.padding_waste == 0.0
    first_512 = layout.plane_offsets[:, :512]  # V as a view of the first 512
    assert np.array_equal(np.sort(first_512.ravel()), np.arange(64 * 512))


@pytest.mark.parametrize(
    ("head_dim", "tile", "padded", "waste"),
    [
        (64, 64, 64, 0.0),
        (80, 64, 128, 3 / 8),
        (80, 32, 96, 1 / 6),
        (96, 64, 128, 1 / 4),
        (96, 32, 96, 0.0),
        (100, 64, 128, 28 / 128),
        (100, 32, 128, 28 / 128),
        (120, 64, 128, 8 / 128),
        (1, 64, 64, 63 / 64),
        (576, 64, 576, 0.0),
    ],
)
def test_padding_of_head_dim_is_reported(  # A48
    head_dim: int, tile: int, padded: int, waste: float
) -> None:
    layout = PageLayout(1, head_dim, torch.float16, 64, tile)
    assert layout.padded_head_dim == padded
    assert layout.padding_waste == pytest.approx(waste)


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (63, 1), (64, 1), (65, 2)])
def test_pages_that_tokens_occupy(tokens: int, pages: int) -> None:
    assert PageLayout(1, 64, torch.float16).pages_for(tokens) == pages


def test_addresses_beyond_31_bits_are_exact() -> None:  # A24, A43
    layout = PageLayout(8, 128, torch.float16)
    page = 2**31 // (layout.page_bytes // 2) + 5
    slot = page * 64 + 63
    near = layout.element_offset(63, 7, 1, 127)
    far = layout.element_offset(slot, 7, 1, 127)
    assert far > 2**31
    assert far - near == page * layout.page_bytes // 2
    assert layout.element_offset(2**40, 0, 0, 0) == 2**40 // 64 * (layout.page_bytes // 2)


# --- refusals ------------------------------------------------------------------------------------
@pytest.mark.parametrize("page_size", [0, -64, 1, 16, 48, 100, 128, 256])
def test_page_size_that_no_kernel_has_is_refused_with_the_list(page_size: int) -> None:  # A47
    with pytest.raises(LayoutError, match=rf"page_size {page_size} .*\[32, 64\]"):
        PageLayout(1, 64, torch.float16, page_size=page_size)


@pytest.mark.parametrize(("page_size", "tile"), [(32, 64), (64, 16), (64, 128), (64, 0), (32, 48)])
def test_tile_that_does_not_fit_is_refused(page_size: int, tile: int) -> None:
    with pytest.raises(LayoutError, match=f"tile {tile} does not fit page_size {page_size}"):
        PageLayout(1, 64, torch.float16, page_size, tile)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.bool, torch.uint8])
def test_dtype_that_no_kernel_has_is_refused_with_the_list(dtype: torch.dtype) -> None:
    with pytest.raises(LayoutError, match=r"float32.*bfloat16.*float8_e5m2"):
        PageLayout(1, 64, dtype)


@pytest.mark.parametrize("head_dim", [0, -1, 1025, 4096])
def test_head_dim_out_of_range_is_refused(head_dim: int) -> None:  # A48
    with pytest.raises(LayoutError, match=rf"head_dim {head_dim} is outside 1..1024"):
        PageLayout(1, head_dim, torch.float16)


def test_layout_without_heads_is_refused() -> None:  # A49
    with pytest.raises(LayoutError, match="num_kv_heads is 0"):
        PageLayout(0, 64, torch.float16)


@pytest.mark.parametrize("planes", [0, 3])
def test_other_counts_of_planes_are_refused(planes: int) -> None:
    with pytest.raises(LayoutError, match=f"planes is {planes}"):
        PageLayout(1, 64, torch.float16, planes=planes)


def test_layout_errors_are_configuration_errors() -> None:
    assert issubclass(LayoutError, ConfigError)
