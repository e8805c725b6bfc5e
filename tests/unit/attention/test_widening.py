"""Which prefill steps are served by widened pages, and what each part of them gets. It needs no
GPU: nothing is widened here."""

from __future__ import annotations

import pytest
import torch
from support.cases import Step, build_step

from bicl.attention import widening
from bicl.attention.widening import (
    MIN_ROWS,
    MIN_ROWS_WITHOUT_WGMMA,
    PageWidener,
    PrefillPart,
)
from bicl.cache.layout import PageLayout
from bicl.errors import BackendError

GROUP = 4
FP8 = PageLayout(8, 64, torch.float8_e4m3fn)
ENOUGH = MIN_ROWS // GROUP  # new tokens of a sequence


@pytest.fixture(autouse=True)
def widened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """First head and pages a sequence of each launch."""
    launches: list[tuple[int, int]] = []

    def record(*tensors: object, first_head: int, pages_per_sequence: int, pdl: bool) -> None:
        launches.append((first_head, pages_per_sequence))

    monkeypatch.setattr(widening, "widen_pages", record)
    monkeypatch.setattr(widening, "uses_wgmma", lambda layer: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return launches


def step_of(lengths: list[tuple[int, int]], layout: PageLayout = FP8) -> Step:
    return build_step(
        lengths, layout, group=GROUP, dtype=torch.bfloat16, k_scale=0.5, filled=False, fill=0.0
    )


def parts_of(widener: PageWidener, step: Step) -> list[PrefillPart]:
    return list(widener.parts(step.query, step.layer, step.meta))


def test_kv_heads_take_turns_in_a_room_that_does_not_hold_all(
    widened: list[tuple[int, int]],
) -> None:
    step = step_of([(ENOUGH, 200), (ENOUGH, 130)])
    one_head = 2 * 4 * 2 * FP8.head_page_bytes  # 2 sequences of 4 pages, twice as wide
    for room, heads in ((8 * one_head, 8), (8 * one_head - 1, 4), (3 * one_head, 2), (one_head, 1)):
        widened.clear()
        parts = parts_of(PageWidener(room_bytes=room), step)
        assert widened == [(first, 4) for first in range(0, 8, heads)]
        for turn, part in enumerate(parts):
            layer, first = part.layer, turn * heads
            assert layer.layout.num_kv_heads == heads
            assert layer.layout.dtype == layer.pages.dtype == torch.bfloat16
            assert layer.pages.shape == layer.layout.shape(8)
            assert (layer.k_scale, layer.v_scale) == (0.5, 1.0)
            assert part.page_table.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
            assert part.query_heads == slice(first * GROUP, (first + heads) * GROUP)


def test_a_step_whose_head_does_not_fit_is_counted_and_told_once(
    caplog: pytest.LogCaptureFixture, widened: list[tuple[int, int]]
) -> None:
    step = step_of([(ENOUGH, 200)])
    widener = PageWidener(room_bytes=4 * 2 * FP8.head_page_bytes - 1)
    for turn in (1, 2):
        (part,) = parts_of(widener, step)
        assert part.layer is step.layer
        assert part.page_table is step.meta.page_table
        assert part.query_heads == slice(None)
        assert widener.num_too_large == turn
    assert len(caplog.records) == 1
    assert not widened


@pytest.mark.parametrize(
    ("options", "lengths", "layout"),
    [
        ({}, [(ENOUGH - 1, 1000)], FP8),
        ({}, [(ENOUGH, 1000), (ENOUGH - 1, 1000)], FP8),
        ({}, [(ENOUGH, 0)], FP8),
        ({"deterministic": True}, [(1000, 1000)], FP8),
        ({}, [(1000, 1000)], PageLayout(8, 64, torch.bfloat16)),
    ],
    ids=["few rows", "few on average", "no keys", "deterministic", "16 bits"],
)
def test_steps_that_gain_nothing_read_the_cache(
    options: dict[str, bool],
    lengths: list[tuple[int, int]],
    layout: PageLayout,
    widened: list[tuple[int, int]],
) -> None:
    step, widener = step_of(lengths, layout), PageWidener(room_bytes=1 << 24, **options)
    (part,) = parts_of(widener, step)
    assert part.layer is step.layer
    assert not widened
    assert widener.num_too_large == 0


def test_pages_that_wgmma_cannot_read_are_widened_for_fewer_rows(
    widened: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = MIN_ROWS_WITHOUT_WGMMA // GROUP
    for uses_wgmma, tokens, launches in ((True, few, 0), (False, few, 1), (False, few - 1, 0)):
        widened.clear()
        monkeypatch.setattr(widening, "uses_wgmma", lambda layer, answer=uses_wgmma: answer)
        parts_of(PageWidener(room_bytes=1 << 24), step_of([(tokens, 1000)]))
        assert len(widened) == launches


def test_the_room_is_made_by_the_first_prefill_over_fp8_whatever_its_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    widener, small = PageWidener(room_bytes=1 << 22), step_of([(2, 2)])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    parts_of(widener, step_of([(2, 2)], PageLayout(8, 64, torch.bfloat16)))
    with pytest.raises(BackendError, match="run one prefill before capturing"):
        parts_of(widener, small)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    parts_of(widener, small)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    (part,) = parts_of(widener, step_of([(ENOUGH, 200)]))
    assert part.layer.pages.dtype == torch.bfloat16
