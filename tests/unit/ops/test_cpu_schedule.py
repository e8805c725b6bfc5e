"""How decode rows are cut into chunks of pages: host arithmetic."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bicl.cache.layout import PageLayout
from bicl.ops.cpu import StepSchedule

LAYOUT = PageLayout(2, 64, torch.float32, swizzle=False)


def schedule_of(keys: list[int]) -> StepSchedule:
    width = max(-(-k // 64) for k in keys)
    table = torch.arange(len(keys) * width, dtype=torch.int32).view(len(keys), width)
    starts = list(range(len(keys) + 1))
    return StepSchedule(table, keys, starts, torch.empty(0, dtype=torch.int64))


def pages_read(schedule: StepSchedule, left: int = -1) -> int:
    return schedule.decode_chunks(LAYOUT, left).index.numel() // (2 * 2)


@settings(max_examples=100, deadline=None)
@given(keys=st.lists(st.integers(1, 9000), min_size=1, max_size=16))
def test_padding_is_bounded_however_skewed_the_lengths(keys: list[int]) -> None:
    """At most half a chunk a row is wasted, and one chunk a page is always a choice."""
    needed = sum(-(-k // 64) for k in keys)
    assert needed <= pages_read(schedule_of(keys)) <= 1.5 * needed + len(keys)


@settings(max_examples=50, deadline=None)
@given(
    keys=st.lists(st.integers(1, 2000), min_size=1, max_size=8),
    left=st.sampled_from([-1, 0, 63, 64, 500]),
)
def test_every_key_in_sight_is_counted_once(keys: list[int], left: int) -> None:
    schedule = schedule_of(keys)
    chunks = schedule.decode_chunks(LAYOUT, left)
    tokens = chunks.index.view(chunks.count, 2, 2, -1)[:, 0, 0] // 4
    slots = (tokens[..., None] * 64 + torch.arange(64)).view(chunks.count, -1)
    if chunks.span is None:
        counted = slots[chunks.mask[:, 0, 0]]
    else:
        counted = slots[:, chunks.span[0] : chunks.span[1]].reshape(-1)
    width = schedule.page_table.shape[1]
    first = [0 if left < 0 else max(0, k - 1 - left) for k in keys]
    expected = [
        row * width * 64 + token for row, k in enumerate(keys) for token in range(first[row], k)
    ]
    assert sorted(counted.tolist()) == expected


def test_alike_rows_need_neither_mask_nor_combine() -> None:
    chunks = schedule_of([130, 130, 130]).decode_chunks(LAYOUT, -1)
    assert (chunks.count, chunks.span) == (3, (0, 130))
    assert chunks.row_of_chunk is None
    assert chunks.mask is None


def test_addresses_are_made_once_for_layers_that_share_them() -> None:
    schedule = schedule_of([130, 5])
    assert schedule.decode_chunks(LAYOUT, -1) is schedule.decode_chunks(LAYOUT, -1)
    assert schedule.decode_chunks(LAYOUT, 64) is not schedule.decode_chunks(LAYOUT, -1)
    assert schedule.store_index(LAYOUT, 6) is schedule.store_index(LAYOUT, 6)
