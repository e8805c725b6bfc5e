"""What holds of strata whatever the scores."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bicl.ops.cpu.select_tiles import select_tiles
from bicl.sparse.config import HySparseConfig
from bicl.sparse.selection import SelectionRule, strata

ROWS = st.lists(st.integers(0, 400), min_size=1, max_size=5)
RULES = st.builds(
    SelectionRule,
    page_size=st.just(32),
    max_k=st.integers(8, 300),
    first=st.integers(1, 3),
    recent=st.integers(1, 4),
    floor=st.integers(0, 20),
    stratum=st.sampled_from([0, 1, 5, 64, 128]),
)
SPARSITY = st.sampled_from([0.0, 0.1, 0.5, 0.65, 0.95])


def kept_of(tiles: list[int], sparsity: float, rule: SelectionRule) -> torch.Tensor:
    count = torch.tensor(tiles, dtype=torch.int32)
    return rule.tiles_to_keep(count, torch.full((len(tiles),), sparsity))


def chosen(
    scores: torch.Tensor,
    tiles: list[int],
    sparsity: float,
    rule: SelectionRule,
    keep: torch.Tensor | None = None,
) -> torch.Tensor:
    """int32 ``[B, Hq, W]``: positions, each query head on its own."""
    batch, heads, width = scores.shape
    table = torch.arange(width, dtype=torch.int32).expand(batch, -1)
    lengths = torch.tensor(tiles, dtype=torch.int32) * rule.page_size
    positions = torch.empty(batch, heads, width, dtype=torch.int32)
    ratios = torch.full((batch,), sparsity)
    pages, _ = select_tiles(
        scores, table, lengths, ratios, rule, heads, "softmax", positions, keep=keep
    )
    kept = kept_of(tiles, sparsity, rule)
    for row in range(batch):
        assert torch.equal(pages[row, :, : kept[row]], positions[row, :, : kept[row]])
    return positions


@settings(max_examples=150, deadline=None)
@given(tiles=ROWS, sparsity=SPARSITY, rule=RULES, room=st.integers(0, 70))
def test_every_stratum_can_give_what_it_is_asked_for(
    tiles: list[int], sparsity: float, rule: SelectionRule, room: int
) -> None:
    kept = kept_of(tiles, sparsity, rule)
    width = max(tiles) + room
    dealt = strata(torch.tensor(tiles, dtype=torch.int32), kept, rule, width)
    sizes = (dealt.places < width).sum(dim=2)
    assert bool((dealt.takes >= 0).all())
    assert bool((dealt.takes <= sizes).all())
    for row, count in enumerate(tiles):
        begin, end = int(dealt.begin[row]), int(dealt.end[row])
        always = begin + count - end
        assert int(dealt.takes[row].sum()) == int(kept[row]) - always
        own = sizes[row][sizes[row] > 0]
        takes = dealt.takes[row][: len(own)]
        assert bool((dealt.takes[row][len(own) :] == 0).all())
        members = dealt.places[row][dealt.places[row] < width]
        assert sorted(members.tolist()) == list(range(begin, end))
        for block in dealt.places[row].T.tolist():
            here = sorted(p for p in block if p < width)
            assert here == list(range(here[0], here[0] + len(here))) if here else True
        if len(own):
            assert int(own.max()) <= (rule.stratum or width)
            assert int(own.max() - own.min()) <= 1
            assert int(takes.max() - takes.min()) <= 1


@settings(max_examples=100, deadline=None)
@given(tiles=ROWS, sparsity=SPARSITY, rule=RULES, seed=st.integers(0, 99))
def test_a_list_is_the_first_pages_the_best_of_each_stratum_and_the_newest(
    tiles: list[int], sparsity: float, rule: SelectionRule, seed: int
) -> None:
    width = max(tiles) + 3
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-4, 4, (len(tiles), 2, width), generator=generator).float()  # ties
    positions = chosen(scores, tiles, sparsity, rule)
    kept = kept_of(tiles, sparsity, rule)
    dealt = strata(torch.tensor(tiles, dtype=torch.int32), kept, rule, width)
    for row, count in enumerate(tiles):
        for head in range(2):
            own = positions[row, head, : kept[row]].tolist()
            assert len(set(own)) == len(own)
            if len(own) == count:
                assert own == list(range(count))
                continue
            assert own[: rule.first] == list(range(rule.first))
            assert own[-rule.recent :] == list(range(count - rule.recent, count))
            picked = own[rule.first : -rule.recent]
            for members, takes in zip(dealt.places[row].tolist(), dealt.takes[row], strict=True):
                here, picked = picked[: int(takes)], picked[int(takes) :]
                left = [p for p in members if p < width and p not in here]
                assert set(here) <= set(members)
                value = {p: (float(scores[row, head, p]), -p) for p in here + left}
                assert here == sorted(here, key=value.__getitem__, reverse=True)
                if here and left:
                    assert value[here[-1]] > max(value[p] for p in left)
            assert not picked


@settings(max_examples=40, deadline=None)
@given(tiles=ROWS, rule=RULES, seed=st.integers(0, 9))
def test_a_choice_does_not_depend_on_the_batch(
    tiles: list[int], rule: SelectionRule, seed: int
) -> None:
    """Nor on how wide the table is, or what stands where nothing is."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(len(tiles), 2, max(tiles) + 90, generator=generator)
    together = chosen(scores, tiles, 0.65, rule)
    kept = kept_of(tiles, 0.65, rule)
    for row, count in enumerate(tiles):
        own = scores[row : row + 1, :, : count + 1].clone()
        own[..., count:] = torch.nan
        alone = chosen(own, [count], 0.65, rule)
        assert torch.equal(alone[0, :, : kept[row]], together[row, :, : kept[row]])


def test_neighbours_are_in_different_strata() -> None:
    """Best pages that lie together are all found, where each stratum takes some."""
    rule = SelectionRule(page_size=64, max_k=512, first=1, recent=2, floor=0, stratum=32)
    scores = torch.zeros(1, 1, 323)
    scores[..., 100:120] = 1.0  # ten strata of 32 pages
    positions = chosen(scores, [323], 0.9, rule)
    assert set(range(100, 120)) <= set(positions[0, 0, :33].tolist())


@pytest.mark.parametrize("page_size", [32, 64])
def test_pages_at_equal_distances_do_not_meet_in_one_stratum(page_size: int) -> None:
    """Chunks of one length all begin that far apart: all of them in some strata where these are
    not turned, 2.9 times as many as a stratum takes of its pages."""
    rule = SelectionRule.of(HySparseConfig(floor_tokens=0), page_size)
    for number in (2, 3, 5, 8, 10, 13, 20, 28, 32):
        for tiles in (number * rule.stratum, (number - 1) * rule.stratum + 7):
            count = torch.tensor([tiles + rule.first + rule.recent], dtype=torch.int32)
            places = strata(count, count // 3, rule, int(count)).places[0] - rule.first
            assert len(places) >= number
            for apart in range(4, 4 * number):
                begins = ((places < tiles) & (places % apart == 0)).sum(dim=1)
                assert int(begins.max()) <= 1.2 * 0.35 * tiles / number


def test_a_head_that_looks_at_the_first_page_has_little_say_in_any_stratum() -> None:
    """One head finds all in page 0, which is kept anyway; the other one wants page 7."""
    rule = SelectionRule(page_size=64, max_k=512, first=1, recent=2, floor=0, stratum=8)
    scores = torch.zeros(1, 2, 19)
    scores[0, 0, 0], scores[0, 0, 3] = 20.0, 9.0
    scores[0, 1, 7] = 4.0
    positions = torch.empty(1, 1, 19, dtype=torch.int32)
    table = torch.arange(19, dtype=torch.int32)[None]
    lengths, ratio = torch.tensor([19 * 64], dtype=torch.int32), torch.tensor([0.74])
    select_tiles(scores, table, lengths, ratio, rule, 1, "softmax", positions)
    assert positions[0, 0, :5].tolist() == [0, 1, 7, 17, 18]


def test_a_stratum_never_pushes_out_a_page_that_is_to_be_kept() -> None:
    """More of them lie in one stratum than it may take; rows without any keep their strata."""
    rule = SelectionRule(page_size=64, max_k=512, first=1, recent=2, floor=0, stratum=10)
    scores = torch.randn(2, 2, 103, generator=torch.Generator().manual_seed(0))
    keep = torch.zeros(2, 103, dtype=torch.bool)
    keep[0, 1:101:10] = True  # all of stratum 0
    marked = chosen(scores, [103, 103], 0.85, rule, keep)
    plain = chosen(scores, [103, 103], 0.85, rule)
    together = chosen(scores, [103, 103], 0.85, replace(rule, stratum=0), keep)
    for head in range(2):
        assert set(range(1, 101, 10)) <= set(marked[0, head, :16].tolist())
    assert torch.equal(marked[0], together[0])
    assert torch.equal(marked[1], plain[1])


@pytest.mark.parametrize("page_size", [32, 64])
def test_up_to_a_stratum_all_pages_compete(page_size: int) -> None:
    rule = SelectionRule.of(HySparseConfig(floor_tokens=0), page_size)
    ends = rule.first + rule.recent
    scores = torch.randn(2, 3, 200, generator=torch.Generator().manual_seed(1))
    most = ends + rule.stratum
    whole = replace(rule, stratum=0)
    for tiles, alike in ((most, True), (most + 1, False)):
        both = [chosen(scores, [tiles, tiles], 0.65, own) for own in (rule, whole)]
        assert torch.equal(*both) is alike
