"""Which tiles are kept: the rule, and the operator against plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bicl.cache.layout import PageLayout
from bicl.ops.cpu.sparse import (
    bound_scores,
    centroid_rows,
    centroid_scores,
    cluster_means,
    quantise_rows,
    select_tiles,
    stored_rows,
    turned,
)
from bicl.sparse.config import COMBINES, HySparseConfig
from bicl.sparse.selection import SelectionRule, least_skipped, tiles_by_layer, tiles_to_keep


def keep(num_tiles: list[int], sparsity: float, rule: SelectionRule) -> list[int]:
    tiles = torch.tensor(num_tiles, dtype=torch.int32)
    return tiles_to_keep(tiles, torch.full(tiles.shape, sparsity), rule).tolist()


def rule(**changes: int) -> SelectionRule:
    values = {"page_size": 64, "max_k": 512, "first": 1, "recent": 2, "floor": 0} | changes
    return SelectionRule(**values)


@pytest.mark.parametrize(
    ("ratio", "kept"), [(0.5, 50), (0.65, 35), (0.7, 30), (0.3, 70), (0.9, 10), (0.0, 100)]
)
def test_a_ratio_counts_windows_of_the_whole_sequence_first_and_recent_included(
    ratio: float, kept: int
) -> None:
    """(A59)"""
    assert keep([100], ratio, rule()) == [kept]


def test_kept_tiles_never_fall_as_a_sequence_grows_and_never_pass_max_k() -> None:
    for ratio in (0.1, 0.3, 0.65, 0.9):
        counts = keep(list(range(3000)), ratio, SelectionRule.of(HySparseConfig(), 64))
        assert counts == sorted(counts)
        assert max(counts) == (300 if ratio == 0.9 else 512)
        assert counts[:17] == list(range(17))  # dense up to the floor of 1,024 tokens


def test_a_dense_row_ignores_max_k() -> None:
    assert keep([3000], 0.0, rule()) == [3000]


def test_choosing_must_save_some_megabytes_on_a_gpu() -> None:
    layout = PageLayout(8, 128, torch.bfloat16, 64)  # 262,144 bytes a page
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert least_skipped(HySparseConfig(), layout, cuda) == 123
    assert least_skipped(HySparseConfig(), PageLayout(8, 128, torch.float8_e4m3fn, 64), cuda) == 245
    assert least_skipped(HySparseConfig(min_skipped_mb=0), layout, cuda) == 1
    assert least_skipped(HySparseConfig(), layout, cpu) == 1


def test_layers_keep_by_their_shares_of_a_rows_sparsity() -> None:
    tiles, sparsity = torch.tensor([100, 100], dtype=torch.int32), torch.tensor([0.5, 0.0])
    kept = tiles_by_layer(tiles, sparsity, rule(), torch.tensor([1.0, 1.5, 3.0]))
    assert kept.tolist() == [[50, 100], [25, 100], [3, 100]]


def test_windows_of_64_tokens_are_two_pages_of_32() -> None:
    small = SelectionRule.of(HySparseConfig(), 32)
    assert (small.max_k, small.first, small.recent, small.floor) == (1024, 2, 4, 48)


def slow_selection(
    scores: torch.Tensor, tiles: int, kept: int, rule: SelectionRule, heads: int, combine: str
) -> list[list[int]]:
    """Positions that each KV head of one row keeps, by the definition."""
    candidates = range(rule.first, tiles - rule.recent)
    always = [p for p in range(tiles) if p not in candidates]
    if kept == tiles:
        return [list(range(tiles))] * heads
    chosen = []
    for own in scores.double().view(heads, -1, scores.shape[-1]):
        total = {}
        for p in candidates:
            values = own[:, p]
            if combine == "softmax":
                values = (own[:, p] - own[:, : tiles - rule.recent].logsumexp(-1)).exp()
            total[p] = float(values.max() if combine == "max" else values.sum())
        best = sorted(candidates, key=lambda p: (-total[p], p))[: kept - len(always)]
        chosen.append(sorted(always + best))
    return chosen


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 1500), min_size=1, max_size=4),
    sparsity=st.sampled_from([0.0, 0.3, 0.65, 0.9]),
    heads=st.integers(1, 3),
    group=st.integers(1, 4),
    limits=st.sampled_from([(512, 1, 2, 0), (5, 1, 1, 0), (40, 2, 3, 8), (16, 1, 2, 16)]),
    combine=st.sampled_from(COMBINES),
    seed=st.integers(0, 9),
)
def test_selection_follows_its_definition(
    lengths: list[int],
    sparsity: float,
    heads: int,
    group: int,
    limits: tuple[int, ...],
    combine: str,
    seed: int,
) -> None:
    own = SelectionRule(64, *limits)
    generator = torch.Generator().manual_seed(seed)
    width = max(-(-n // 64) for n in lengths) + 2
    scores = torch.randn(len(lengths), heads * group, width, generator=generator) * 3
    table = torch.randperm(len(lengths) * width, generator=generator)
    table = table.view(len(lengths), width).to(torch.int32)
    seqlens = torch.tensor(lengths, dtype=torch.int32)
    ratios = torch.full((len(lengths),), sparsity)
    positions = torch.empty(len(lengths), heads, width, dtype=torch.int32)
    pages, selected = select_tiles(scores, table, seqlens, ratios, own, heads, combine, positions)
    assert pages.dtype == selected.dtype == torch.int32
    for row, length in enumerate(lengths):
        tiles = -(-length // 64)
        kept = keep([tiles], sparsity, own)[0]
        assert selected[row] == length - (tiles - kept) * 64
        expected = slow_selection(scores[row], tiles, kept, own, heads, combine)
        assert positions[row, :, :kept].tolist() == expected
        assert pages[row, :, :kept].tolist() == [table[row, p].tolist() for p in expected]


def test_of_equal_scores_the_earlier_page_wins() -> None:
    positions = torch.empty(1, 1, 20, dtype=torch.int32)
    select_tiles(
        torch.zeros(1, 2, 20),
        torch.arange(20, dtype=torch.int32)[None],
        torch.tensor([20 * 64], dtype=torch.int32),
        torch.tensor([0.5]),
        rule(),
        1,
        "softmax",
        positions,
    )
    assert positions[0, 0, :10].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 18, 19]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_no_score_takes_the_place_of_the_first_and_recent_windows(bad: float) -> None:
    """A damaged index may say anything. (A55)"""
    positions = torch.empty(1, 2, 40, dtype=torch.int32)
    for combine in COMBINES:
        select_tiles(
            torch.full((1, 4, 40), bad),
            torch.arange(40, dtype=torch.int32)[None],
            torch.tensor([40 * 64 - 5], dtype=torch.int32),
            torch.tensor([0.9]),
            rule(),
            2,
            combine,
            positions,
        )
        kept = positions[0, :, :4].tolist()
        assert all(own[0] == 0 and own[-2:] == [38, 39] for own in kept)


def test_heads_that_look_at_the_first_page_have_little_say() -> None:
    """One head finds all in page 0, which is kept anyway; the other one wants page 7."""
    scores = torch.zeros(1, 2, 20)
    scores[0, 0, 0], scores[0, 0, 3] = 20.0, 9.0
    scores[0, 1, 7] = 4.0
    positions = torch.empty(1, 1, 20, dtype=torch.int32)
    table = torch.arange(20, dtype=torch.int32)[None]
    lengths, ratio = torch.tensor([20 * 64], dtype=torch.int32), torch.tensor([0.8])
    select_tiles(scores, table, lengths, ratio, rule(), 1, "softmax", positions)
    assert positions[0, 0, :4].tolist() == [0, 7, 18, 19]


def hadamard(dims: int) -> torch.Tensor:
    """float32 ``[dims, dims]``: blocks of the greatest power of two in them."""
    block = torch.ones(1, 1)
    while dims % (2 * len(block)) == 0:
        block = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]) / 2**0.5, block)
    return torch.kron(torch.eye(dims // len(block)), block)


@pytest.mark.parametrize("dims", [8, 24, 64, 80, 96, 128, 192, 256])
def test_a_turn_is_a_hadamard_matrix_and_leaves_products_as_they_are(dims: int) -> None:
    generator = torch.Generator().manual_seed(dims)
    rows, others = torch.randn(2, 3, 5, dims, generator=generator)
    there = turned(rows)
    torch.testing.assert_close(there, rows @ hadamard(dims), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close((there * turned(others)).sum(-1), (rows * others).sum(-1))
    torch.testing.assert_close(turned(there), rows, atol=1e-5, rtol=1e-5)
    alone = torch.stack([turned(row) for row in rows.flatten(0, 1)]).view_as(rows)
    assert torch.equal(there, alone)


def test_a_dim_far_out_leaves_the_others_their_steps() -> None:
    """Each key is a centroid of its own: what is off is what rounding does."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(32, 2, 64, 64, generator=generator)
    keys[..., 5] += 40.0
    query = torch.randn(2, 2, 64, generator=generator)
    query[..., 5] = 0.0  # which does not look there
    real = torch.einsum("hgd,whtd->hgwt", query, keys).mul(0.125).logsumexp(-1)
    rows = cluster_means(keys, 64)
    means, facts = rows[..., :-2], rows[..., -2:]
    rounded = stored_rows(*quantise_rows(means), *facts.unbind(-1))[..., :-2]

    def error(vectors: torch.Tensor) -> float:
        vectors = vectors.transpose(0, 1)[None]
        found = centroid_scores(query.view(1, 4, 64), vectors, torch.ones(1, 64), 0.125)
        off = found.view_as(real) - real
        return float(off.std())

    assert error(centroid_rows(keys, 64)) < error(torch.cat((turned(rounded), facts), -1)) / 3


def slow_centroids(keys: torch.Tensor, count: int) -> torch.Tensor:
    """The definition of ``centroid_rows`` for one page and head ``[P, D]``."""
    points = keys.double()
    distances = (points - points.mean(0)).square().sum(-1)
    seeds: list[int] = []
    for _ in range(count):
        seeds.append(max(range(len(points)), key=lambda t: (float(distances[t]), -t)))
        apart = torch.stack([(points - points[s]).square().sum(-1) for s in seeds])
        distances = apart.amin(0)
    owner = [min(range(count), key=lambda c: (float(apart[c, t]), c)) for t in range(len(points))]
    rows = []
    for cluster in range(count):
        own = points[[t for t, c in enumerate(owner) if c == cluster]]
        spread = (own - own.mean(0)).square().mean().float().to(torch.float8_e5m2).float()
        mean = own.mean(0).float() @ hadamard(points.shape[1])
        least, step = mean.min().half().float(), ((mean.max() - mean.min()) / 15).half().float()
        mean = ((mean - least) / step).round().clamp(0, 15) * step + least
        rows.append(torch.cat((mean, torch.tensor([math.log(len(own)), float(spread)]))))
    return torch.stack(rows).float()


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_centroids_follow_their_definition(count: int) -> None:
    keys = torch.randn(3, 2, 64, 16, generator=torch.Generator().manual_seed(count))
    keys[1] = keys[1].round()  # equal distances
    rows = centroid_rows(keys, count)
    for page in range(3):
        for head in range(2):
            expected = slow_centroids(keys[page, head], count)
            torch.testing.assert_close(rows[page, head], expected, atol=1e-6, rtol=1e-6)
    alone = torch.stack([centroid_rows(keys[n : n + 1], count)[0] for n in range(3)])
    assert torch.equal(rows, alone)


def test_a_key_unlike_the_others_has_a_centroid_to_itself() -> None:
    keys = torch.randn(1, 1, 64, 32, generator=torch.Generator().manual_seed(0))
    keys[0, 0, 41] *= 6.0
    rows = cluster_means(keys, 4)[0, 0]
    assert torch.equal(rows[0, :-2], keys[0, 0, 41])
    assert rows[0, -2:].tolist() == [0.0, 0.0]
    assert float(rows[:, -2].exp().sum()) == pytest.approx(64)


def test_keys_around_a_centroid_weigh_more_than_at_it() -> None:
    """Of keys that lie around it in all directions alike, as much as they do on average."""
    generator = torch.Generator().manual_seed(1)
    keys = torch.randn(1, 1, 4096, 64, generator=generator) * 0.4 + 1.0
    query = torch.randn(1, 1, 64, generator=generator)
    rows = centroid_rows(keys, 1).transpose(0, 1)[None]
    real = float((keys[0, 0] @ query[0, 0]).logsumexp(0))
    found = float(centroid_scores(query, rows, torch.ones(1, 64), 1.0))
    rows[..., -1] = 0.0
    flat = float(centroid_scores(query, rows, torch.ones(1, 64), 1.0))
    assert abs(found - real) < 1.0 < real - flat


def test_a_row_keeps_its_ends_and_is_off_by_half_a_step_at_most() -> None:
    means = torch.randn(7, 64, generator=torch.Generator().manual_seed(0)) * 3
    means[3] = 2.0  # no range
    steps, affine = quantise_rows(means)
    assert steps.dtype == torch.uint8
    assert (int(steps.min()), int(steps.max())) == (0, 15)
    kept = steps.float() * affine[:, :1].float() + affine[:, 1:].float()
    half = affine[:, :1].float() / 2 + 0.01  # and what float16 rounds
    assert bool(((kept - means).abs() <= half).all())
    assert torch.equal(kept[3], means[3])


def test_identical_keys_weigh_as_much_as_they_are() -> None:
    keys = turned(torch.ones(1, 1, 64, 16))
    query = turned(torch.full((1, 1, 16), 0.5))
    rows = centroid_rows(keys, 4).transpose(0, 1)[None]
    scores = centroid_scores(query, rows, torch.ones(1, 16), 0.25)
    assert float(scores) == pytest.approx(0.25 * 8 + math.log(64))


def test_as_many_centroids_as_keys_give_the_true_mass() -> None:
    keys = torch.randn(5, 2, 32, 16, generator=torch.Generator().manual_seed(1))
    keys = keys.clamp(-2, 2).mul(3.5).round()
    keys[..., 0], keys[..., 1] = -7.0, 8.0  # exact in steps of one
    keys = turned(keys)  # which the index turns back
    query = torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(2))
    rows = centroid_rows(keys, 32).transpose(0, 1)[None]
    scores = centroid_scores(query, rows, torch.ones(1, 16), 0.25).view(2, 2, 5)
    real = torch.einsum("hgd,whtd->hgwt", query.view(2, 2, 16), keys) * 0.25
    torch.testing.assert_close(scores, real.logsumexp(-1), atol=1e-5, rtol=1e-5)


def test_unit_weights_give_the_upper_bound_of_quest() -> None:
    query = torch.randn(2, 4, 16)
    keys = torch.randn(2, 2, 5, 64, 16)  # [B, H, W, tokens, D]
    boxes = torch.stack((keys.amin(3), keys.amax(3)), dim=3)
    scores = bound_scores(query, boxes, torch.ones(2, 16), 0.25).view(2, 2, 2, 5)
    grouped = query.view(2, 2, 2, 1, 16)
    low, high = (grouped * boxes[:, :, None, :, side] for side in (0, 1))
    torch.testing.assert_close(scores, torch.maximum(low, high).sum(-1) * 0.25)
    real = torch.einsum("bhgd,bhwtd->bhgwt", query.view(2, 2, 2, 16), keys).amax(-1) * 0.25
    assert (scores >= real - 1e-4).all()
