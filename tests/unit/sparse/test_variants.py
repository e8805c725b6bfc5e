"""All variants keep as many keys, the same ones always, and what each of them promises."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bicl.sparse.selection import SelectionRule
from bicl.sparse.sgm import PAGE_GATES, SpatialGate
from bicl.sparse.variants import VARIANTS, Choice, DecodeRows, kept_keys, largest

RULE = SelectionRule(page_size=64, max_k=512, first=1, recent=2, floor=0)
TOKENS = 64 * 20 + 17


def rows(shared: tuple[int, ...] = (TOKENS, TOKENS, 900), seed: int = 0) -> DecodeRows:
    generator = torch.Generator().manual_seed(seed)
    count = len(shared)
    length = torch.tensor(shared, dtype=torch.int32) + 5
    query = torch.randn(count, 4, 64, generator=generator) * 2
    key = torch.randn(TOKENS, 2, 64, generator=generator)
    before = torch.randn(count, 4, 64, generator=generator) * 2
    return DecodeRows(query, key, torch.tensor(shared, dtype=torch.int32), length, 0.125, before)


def choice(sparsity: float = 0.65, count: int = 3) -> Choice:
    weights = {kind: gate((0,), 64).weights_of(0).detach() for kind, gate in PAGE_GATES.items()}
    return Choice(RULE, torch.full((count,), sparsity), weights, SpatialGate(64))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("sparsity", [0.3, 0.65, 0.9])
def test_every_variant_keeps_as_many_keys_and_the_windows_at_both_ends(
    variant: str, sparsity: float
) -> None:
    """(A55)"""
    shown = rows()
    with torch.inference_mode():
        kept = kept_keys(variant, shown, choice(sparsity))
    tiles = (shown.length + 63) // 64
    skipped = tiles - RULE.tiles_to_keep(tiles, torch.full((3,), sparsity))
    expected = shown.shared - skipped * 64
    assert torch.equal(kept.sum(-1), expected[:, None].expand(-1, 2).long())
    for row, (length, shared) in enumerate(zip(shown.length, shown.shared, strict=True)):
        recent = int((length + 63) // 64 - 2) * 64
        assert kept[row, :, :64].all()
        assert kept[row, :, recent:shared].all()
        assert not kept[row, :, shared:].any()


@pytest.mark.parametrize("variant", VARIANTS)
def test_zero_sparsity_keeps_everything_seen(variant: str) -> None:
    shown = rows()
    with torch.inference_mode():
        kept = kept_keys(variant, shown, choice(0.0))
    seen = torch.arange(TOKENS) < shown.shared[:, None]
    assert torch.equal(kept, seen[:, None].expand(-1, 2, -1))


def mass(variant: str, sparsity: float = 0.8) -> float:
    shown = rows(seed=3)
    with torch.inference_mode():
        kept = kept_keys(variant, shown, choice(sparsity))
    query = shown.query.unflatten(1, (2, 2))
    scores = torch.einsum("rhgd,thd->rhgt", query, shown.key) * shown.scale
    hidden = torch.arange(TOKENS) >= shown.shared[:, None]
    share = scores.masked_fill(hidden[:, None, None], -torch.inf).softmax(-1)
    return float((share * kept[:, :, None]).sum(-1).mean())


def test_true_attention_keeps_most_and_our_boxes_more_than_chance() -> None:
    kept = {variant: mass(variant) for variant in VARIANTS}
    assert max(kept, key=kept.__getitem__) == "oracle-token"
    tiles = ("centroids", "bounds", "quest", "sink-recent", "random", "gate")
    assert all(kept["oracle"] >= kept[name] for name in tiles)
    assert kept["bounds"] > kept["random"]


def test_what_is_chosen_a_step_early_is_what_that_steps_query_chooses() -> None:
    shown, own = rows(), choice()
    with torch.inference_mode():
        early = kept_keys("centroids", replace(shown, query=shown.before), own)
        assert torch.equal(kept_keys("centroids-ahead", shown, own), early)
        assert not torch.equal(kept_keys("centroids", shown, own), early)
    with pytest.raises(ValueError, match="step before"):
        kept_keys("centroids-ahead", replace(shown, before=None), own)


def test_half_of_the_pages_is_the_best_by_either_query() -> None:
    """0.65 of 21 tiles leaves eight: four by the query of the step before, then the best others."""
    shown = rows((TOKENS,) * 3)

    def kept(variant: str, sparsity: float, query: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return kept_keys(variant, replace(shown, query=query), choice(sparsity))

    assert shown.before is not None
    early = kept("centroids", 0.825, shown.before)
    both = kept("centroids-half", 0.65, shown.query)
    assert not torch.equal(both, kept("centroids", 0.65, shown.query))
    order = [kept("centroids", 1 - tiles / 21, shown.query) for tiles in range(3, 22)]
    for row in range(3):
        for head in range(2):
            grown = [early[row, head] | more[row, head] for more in order]
            assert any(torch.equal(both[row, head], union) for union in grown)


@pytest.mark.parametrize("variant", ["centroids-ahead", "centroids-both", "centroids-half"])
def test_the_query_of_the_step_before_changes_nothing_where_it_is_the_same(variant: str) -> None:
    shown = replace(rows(), before=rows().query)
    with torch.inference_mode():
        kept = kept_keys(variant, shown, choice())
        assert torch.equal(kept, kept_keys("centroids", shown, choice()))


def test_two_steps_queries_agree_as_the_heads_of_a_group_do() -> None:
    """The order of a group's heads decides nothing."""
    shown = rows()
    assert shown.before is not None
    twice = torch.stack((shown.query, shown.before), dim=2).flatten(1, 2)
    with torch.inference_mode():
        both = kept_keys("centroids-both", shown, choice())
        assert torch.equal(both, kept_keys("centroids", replace(shown, query=twice), choice()))
        assert not torch.equal(both, kept_keys("centroids", shown, choice()))


def test_the_literal_form_spreads_its_choice_over_all_windows() -> None:
    """A softmax inside each window makes windows alike: none may be left out."""
    with torch.inference_mode():
        kept = kept_keys("literal", rows(), choice(0.65))
    windows = kept[0, :, : 64 * 18].unflatten(1, (18, 64)).sum(-1)
    assert windows.min() > 0


def test_the_largest_are_those_of_a_stable_sort() -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randint(-3, 4, (4, 2, 50), generator=generator) / 4
    values[0, :, :9] = torch.inf
    values[1, :, 40:] = -torch.inf
    values[2] = torch.randn(2, 50, generator=generator)
    for number in (0, 1, 7, 49, 50):
        order = values.argsort(dim=-1, descending=True, stable=True)[..., :number]
        expected = torch.zeros_like(values, dtype=torch.bool).scatter_(2, order, True)
        assert torch.equal(largest(values, torch.tensor(number).expand(4, 1, 1)), expected)
