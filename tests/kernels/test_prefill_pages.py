"""What prefill reads of pages of 64 and 32 tokens, and what it must not."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from support.cases import FP8_DTYPES, PREFILL_LENGTHS
from support.device import DEVICE
from support.prefill import layout_of, of_pages, packed_step, run

from bicl.attention.cuda import CudaBackend
from bicl.attention.pool import LayerCache
from bicl.ops.cuda.prefill_attention import uses_wgmma

pytestmark = pytest.mark.gpu

BITS: tuple[dict[str, float], ...] = (
    {},
    {"deterministic": True},
    {"window_left": 150},
    {"softcap": 15.0},
    {"window_left": 1000, "window_right": 20, "softcap": 15.0},
)


@pytest.mark.parametrize("options", BITS, ids=str)
@pytest.mark.parametrize("lengths", list(PREFILL_LENGTHS))
@pytest.mark.parametrize("head_dim", [64, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_pages_of_32_give_the_bits_of_pages_of_64(
    dtype: torch.dtype, head_dim: int, lengths: str, options: dict[str, float]
) -> None:
    """Where wgmma reads both: the same blocks of keys, the same products. Pages of 64 pad head dims
    of 96 and 160 with zeros."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("elsewhere a tile's keys go by its pages")
    large, small = (
        packed_step(
            PREFILL_LENGTHS[lengths], layout_of(2, head_dim, dtype, page), group=4, dtype=dtype
        )
        for page in (64, 32)
    )
    CudaBackend().store(small.layer, large.key, large.value, small.slots)
    assert uses_wgmma(large.layer)
    assert uses_wgmma(small.layer)
    expected = run(large, scale=head_dim**-0.5, **options)
    found = run(replace(small, query=large.query), scale=head_dim**-0.5, **options)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@of_pages
@pytest.mark.parametrize("stored", [torch.bfloat16, *FP8_DTYPES], ids=str)
def test_nothing_beyond_the_lengths_reaches_a_row(stored: torch.dtype, page: int) -> None:
    """Other values in slots past the lengths and in later pages change no bit, not even inf."""
    layout = layout_of(2, 128, stored, page)
    step = packed_step(((100, 150), (5, 5), (60, 60)), layout, group=4, dtype=torch.bfloat16)
    expected, _ = run(step, scale=0.1)
    owned = torch.zeros(step.layer.num_pages * page, dtype=torch.bool, device=DEVICE)
    owned[step.slots] = True
    for poison in (math.inf, -math.inf, 3e38):
        wide = torch.full((1, 2, 128), poison, device=DEVICE, dtype=torch.bfloat16)
        free = (~owned).nonzero().flatten()
        filler = wide.expand(len(free), -1, -1)
        CudaBackend().store(step.layer, filler, filler, free)
        out, _ = run(step, scale=0.1)
        assert torch.equal(out, expected)


@of_pages
@pytest.mark.parametrize("first", [0, 5000])
@pytest.mark.parametrize("lengths", ["long, short and empty", "short on a long prefix"])
def test_page_tables_may_be_slices(lengths: str, first: int, page: int) -> None:
    """A CTA asks for the whole table ahead: entries that are nobody's, and what lies behind the
    last row, do no harm."""
    layout = layout_of(2, 128, torch.bfloat16, page)
    step = packed_step(PREFILL_LENGTHS[lengths], layout, group=4, dtype=torch.bfloat16)
    expected, _ = run(step, scale=0.1)
    table = step.meta.page_table
    columns = table.shape[1]
    wide = torch.full((table.shape[0], 9000), -(1 << 31), dtype=torch.int32, device=DEVICE)
    wide[:, first : first + columns] = table
    sliced = replace(step.meta, page_table=wide[:, first : first + columns])
    out, _ = run(replace(step, meta=sliced), scale=0.1)
    assert torch.equal(out, expected)


def test_pools_above_two_billion_elements() -> None:
    layout = layout_of(8, 128, torch.float16)
    num_pages = (1 << 31) // (layout.page_bytes // 2) + 40  # the last pages lie past 2**31
    if torch.cuda.mem_get_info()[0] < num_pages * layout.page_bytes * 1.1:
        pytest.skip("needs 5 GB of free device memory")
    small = packed_step(((100, 300), (64, 64)), layout, group=4, dtype=torch.float16)
    pages = torch.empty(layout.shape(num_pages), dtype=torch.float16, device=DEVICE)
    shift = num_pages - small.layer.num_pages
    pages[shift:] = small.layer.pages
    table = small.meta.page_table.clone()
    for i, length in enumerate([300, 64]):
        table[i, : layout.pages_for(length)] += shift
    large = replace(
        small, layer=LayerCache(pages, layout), meta=replace(small.meta, page_table=table)
    )
    for force_sm80 in (False, True):
        expected, _ = run(small, scale=0.1, force_sm80=force_sm80)
        out, _ = run(large, scale=0.1, force_sm80=force_sm80)
        assert torch.equal(out, expected)
