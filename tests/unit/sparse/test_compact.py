"""Which tokens compact mode keeps: whole passages around what the end of a prompt looks at."""

from __future__ import annotations

import pytest
import torch

from bicl.sparse.compact import (
    OBSERVED,
    SMOOTHING,
    choose_tokens,
    token_scores,
    tokens_to_keep,
)
from bicl.sparse.selection import SelectionRule

RULE = SelectionRule(page_size=64, max_k=512, first=1, recent=2, floor=0)
TOKENS = 64 * 20 + 17


def looked_at(*places: int, heads: int = 2) -> torch.Tensor:
    """Votes that all fall on a few tokens, and next to nothing on every other."""
    scores = torch.rand(heads, TOKENS, generator=torch.Generator().manual_seed(0)) * 1e-6
    scores[:, list(places)] = 1.0
    return scores


def test_a_passage_around_what_is_looked_at_stays_whole() -> None:
    """An answer of a dozen tokens begins where the last query looks, and ends beyond it."""
    votes = looked_at(500)
    kept = choose_tokens(votes, tokens_to_keep(TOKENS, 0.65, RULE), RULE)
    assert votes.gather(1, kept.long()).sum() / votes.sum() > 0.99
    reach = SMOOTHING // 2
    assert reach >= 12
    for head in kept.tolist():
        assert set(range(500 - reach, 500 + reach + 1)) <= set(head)


@pytest.mark.parametrize("ratio", [0.3, 0.65, 0.9])
def test_the_first_window_and_the_newest_ones_stay_and_the_number_is_the_rules(
    ratio: float,
) -> None:
    number = tokens_to_keep(TOKENS, ratio, RULE)
    kept = choose_tokens(looked_at(300, 700), number, RULE)
    assert kept.shape == (2, number)
    assert (kept.diff(dim=1) > 0).all()
    always = set(range(64)) | set(range(64 * 19, TOKENS))
    assert all(always <= set(head) for head in kept.tolist())


def test_forced_tokens_stay_whatever_the_votes() -> None:
    forced = torch.tensor([[900, 901], [100, 1000]])
    number = tokens_to_keep(TOKENS, 0.9, RULE)
    kept = choose_tokens(looked_at(300), number, RULE, forced)
    assert all({*own} <= {*head} for own, head in zip(forced.tolist(), kept.tolist(), strict=True))


def test_the_votes_are_the_newest_queries_attention() -> None:
    generator = torch.Generator().manual_seed(1)
    key = torch.randn(90, 2, 16, generator=generator)
    query = torch.randn(OBSERVED, 6, 16, generator=generator)
    scores, entropy = token_scores(query, key, scale=0.25)
    logits = torch.einsum("qhd,nhd->hqn", query, key.repeat_interleave(3, dim=1)) * 0.25
    future = torch.arange(90) > (90 - OBSERVED + torch.arange(OBSERVED))[:, None]
    share = logits.masked_fill(future, -torch.inf).softmax(-1)
    torch.testing.assert_close(scores, share.mean(1).view(2, 3, 90).sum(1))
    torch.testing.assert_close(entropy, -share.square().sum(-1).log().mean())
