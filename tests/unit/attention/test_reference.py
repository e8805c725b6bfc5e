"""The reference against formulas that share nothing with it."""

from __future__ import annotations

import math

import pytest
import torch
from support.cases import build_step
from support.compare import visible

from bicl.attention import reference
from bicl.cache.layout import PageLayout


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("left", "right"), [(-1, -1), (0, 0), (3, -1), (-1, 2), (5, 1)])
@pytest.mark.parametrize(("num_q", "num_k"), [(5, 9), (9, 5), (1, 7), (6, 6)])
def test_attention_equals_masked_softmax_in_double_precision(
    num_q: int, num_k: int, left: int, right: int, causal: bool
) -> None:
    query = torch.randn(num_q, 4, 16)
    key, value = torch.randn(2, num_k, 2, 16)
    out, lse = reference.attention(
        query, key, value, scale=0.3, causal=causal, window_left=left, window_right=right
    )
    mask = visible(num_q, num_k, causal, left, right)
    doubled = [x.double().repeat_interleave(2, dim=1) for x in (key, value)]
    scores = torch.einsum("qhd,khd->hqk", query.double(), doubled[0]) * 0.3
    scores = scores.masked_fill(~mask, -math.inf)
    torch.testing.assert_close(lse.double(), torch.logsumexp(scores, -1), atol=1e-5, rtol=1e-5)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    expected = torch.einsum("hqk,khd->qhd", weights, doubled[1])
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


def test_causal_mask_is_aligned_to_the_bottom_right_corner() -> None:
    """FlashAttention's two printed examples. (A4)"""
    assert visible(2, 5, causal=True).int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert visible(5, 2, causal=True).int().tolist() == [[0, 0], [0, 0], [0, 0], [1, 0], [1, 1]]


def test_window_keeps_both_ends() -> None:
    """Values that tell which keys were seen: W keeps W + 1 keys."""
    key = torch.zeros(6, 1, 8)
    value = torch.eye(8)[:6, None, :]
    out, _ = reference.attention(
        torch.zeros(1, 1, 8), key, value, scale=1.0, causal=True, window_left=2
    )
    torch.testing.assert_close(out[0, 0, :6], torch.tensor([0.0, 0.0, 0.0, 1, 1, 1]) / 3)


def test_softcap_bounds_scores() -> None:
    query = torch.full((1, 1, 8), 100.0)
    key = torch.full((2, 1, 8), 100.0)
    key[1] = -100.0
    _, lse = reference.attention(query, key, key, scale=1.0, causal=True, softcap=5.0)
    expected = math.log(math.exp(5.0) + math.exp(-5.0))
    assert lse.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("swizzle", [False, True])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_stored_rows_come_back_from_their_slots(head_dim: int, swizzle: bool) -> None:
    layout = PageLayout(3, head_dim, torch.float32, swizzle=swizzle)
    step = build_step([(1, 130), (0, 3)], layout)
    key, value = reference.gather(step.layer, step.meta.page_table, step.meta.cache_seqlens)
    assert torch.equal(key, step.key)
    assert torch.equal(value, step.value)


def test_store_puts_each_element_where_the_layout_says() -> None:
    layout = PageLayout(2, 40, torch.float16, page_size=32, tile=32)
    step = build_step([(1, 5)], layout, dtype=torch.float16)
    flat = step.layer.pages.view(-1)
    for token, slot in enumerate(step.slots.tolist()):
        for head in range(2):
            for plane, rows in enumerate((step.key, step.value)):
                for dim in range(40):
                    place = layout.element_offset(slot, head, plane, dim)
                    assert flat[place] == rows[token, head, dim]
                assert flat[layout.element_offset(slot, head, plane, 63)] == 0
