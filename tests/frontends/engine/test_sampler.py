"""Sampling rules against transformers' own processors, and what the engine's rows may not do to
each other."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.generation import logits_process as hf

from bicl.attention.results import ResultCopies
from bicl.frontends.http.engine import sampler
from bicl.frontends.http.engine.sampler import Choice, SamplingState
from bicl.frontends.http.request import GenerationParams

VOCAB = 97
HISTORY = [5, 9, 5, 41, 3, 5]
CPU = torch.device("cpu")


def state(grammar=None, **options) -> SamplingState:
    return SamplingState(GenerationParams(8, **options), grammar, CPU)


def choose(scores: torch.Tensor, states: list, histories: list) -> list[Choice]:
    return sampler.choose(scores, states, histories, ResultCopies(CPU)).read()


def logits(rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def after_rules(**options) -> torch.Tensor:
    """Log-probabilities of the whole vocabulary after the rules."""
    (choice,) = choose(logits(), [state(top_n_tokens=VOCAB, **options)], [HISTORY])
    out = torch.full((VOCAB,), -math.inf)
    for token, value in choice.top:
        out[token] = value
    return out


@pytest.mark.parametrize(
    ("options", "processor"),
    [
        ({"temperature": 0.7}, hf.TemperatureLogitsWarper(0.7)),
        ({"top_k": 7}, hf.TopKLogitsWarper(7)),
        ({"top_k": 1000}, hf.TopKLogitsWarper(1000)),
        ({"top_p": 0.8}, hf.TopPLogitsWarper(0.8)),
        ({"top_p": 0.001}, hf.TopPLogitsWarper(0.001)),
        ({"typical_p": 0.6}, hf.TypicalLogitsWarper(0.6)),
        ({"repetition_penalty": 1.7}, hf.RepetitionPenaltyLogitsProcessor(1.7)),
    ],
    ids=str,
)
def test_each_rule_equals_transformers(options, processor) -> None:
    expected = processor(torch.tensor([HISTORY]), logits()).log_softmax(-1)[0]
    torch.testing.assert_close(after_rules(**options), expected)


def test_rules_apply_in_tgi_order() -> None:
    scores = logits()
    for processor in (
        hf.RepetitionPenaltyLogitsProcessor(1.3),
        hf.TemperatureLogitsWarper(1.5),
        hf.TopKLogitsWarper(40),
        hf.TopPLogitsWarper(0.9),
        hf.TypicalLogitsWarper(0.95),
    ):
        scores = processor(torch.tensor([HISTORY]), scores)
    got = after_rules(repetition_penalty=1.3, temperature=1.5, top_k=40, top_p=0.9, typical_p=0.95)
    torch.testing.assert_close(got, scores.log_softmax(-1)[0])


def test_frequency_penalty_grows_with_the_share_of_a_token() -> None:
    expected = logits()[0]
    for token in HISTORY:
        expected[token] -= 0.9 / len(HISTORY)
    got = after_rules(frequency_penalty=0.9)
    torch.testing.assert_close(got, expected.log_softmax(-1))


def test_watermark_favours_half_of_the_vocabulary_chosen_by_the_last_token() -> None:
    plain, marked = after_rules(), after_rules(watermark=True)
    gain = marked - plain
    green = gain > gain.mean()
    assert green.sum() == VOCAB // 2
    torch.testing.assert_close((gain[green].mean() - gain[~green].mean()).item(), 2.0)


def test_greedy_takes_the_best_and_its_logprob() -> None:
    scores = logits()
    (choice,) = choose(scores.clone(), [state()], [HISTORY])
    assert choice.token_id == int(scores.argmax())
    assert choice.logprob == pytest.approx(float(scores.log_softmax(-1).max()))


def test_draws_follow_the_probabilities() -> None:
    scores = torch.tensor([[0.0, 1.0, 2.0]]).repeat(4000, 1)
    states = [state(do_sample=True, seed=i) for i in range(4000)]
    picked = torch.tensor([c.token_id for c in choose(scores.clone(), states, [[0]] * 4000)])
    share = torch.bincount(picked, minlength=3) / 4000
    torch.testing.assert_close(share, scores[0].softmax(-1), atol=0.03, rtol=0)


@pytest.mark.parametrize("seed", [0, 1, 2**63 + 5, 2**64 - 1])
def test_seed_gives_the_same_tokens_alone_or_batched(seed: int) -> None:
    options = {"do_sample": True, "seed": seed, "temperature": 1.2, "top_p": 0.9, "top_k": 50}
    alone, batched = state(**options), state(**options)
    others = [state(), state(do_sample=True, seed=3), state(top_k=3, typical_p=0.5)]
    for step in range(12):
        scores = logits(4, seed=step)
        (one,) = choose(scores[2:3].clone(), [alone], [HISTORY])
        many = choose(scores.clone(), [*others[:2], batched, others[2]], [HISTORY] * 4)
        assert many[2].token_id == one.token_id


@pytest.mark.parametrize(("n", "count"), [(0, 0), (1, 1), (2, 4), (4, 4), (5, 5), (500, 6)])
def test_top_tokens_include_ties(n: int, count: int) -> None:
    """TGI's rule: if tokens tie with the last one, those too."""
    scores = torch.tensor([[1.0, 5.0, 3.0, 3.0, 3.0, 0.0]])
    (choice,) = choose(scores, [state(top_n_tokens=n)], [[0]])
    assert len(choice.top) == count
    values = [value for _, value in choice.top]
    assert values == sorted(values, reverse=True)


def test_failing_grammar_fails_its_own_row_only() -> None:
    class Broken:
        def allowed(self):
            raise ValueError("no token fits")

    scores = logits(2)
    broken, fine = choose(scores.clone(), [state(Broken()), state()], [HISTORY] * 2)
    assert "no token fits" in str(broken.error)
    assert fine.error is None
    assert fine.token_id == int(scores[1].argmax())
