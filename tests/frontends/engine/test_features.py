"""Grammar, prompt log-probabilities, seeds and stop sequences through the whole engine."""

from __future__ import annotations

import json
import re

import pytest
import torch
from support.driving import generate, plain_twin, request, running

from bicl.errors import InvalidInputError
from bicl.frontends.http.request import Grammar, GrammarKind, RequestFailed

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine(smollm2):
    with running(smollm2, max_total_tokens=512, max_batch_size=8) as engine:
        yield engine


def encode(loaded, text: str) -> list[int]:
    return loaded.tokenizer(text).input_ids


def random_prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, 260, (length,), generator=generator).tolist()


# --- grammar -----------------------------------------------------------------------------------
def test_json_grammar_gives_json(engine, smollm2) -> None:
    grammar = Grammar(GrammarKind.JSON, json.dumps(SCHEMA))
    prompt = encode(smollm2, "Alice is 30 years old. As JSON:")
    plain = request(prompt, 8)
    result, free = generate(engine, request(prompt, 60, grammar=grammar, ignore_eos=False), plain)
    value = json.loads(result.done.generated_text)
    assert result.done.finish_reason == "eos_token"
    assert isinstance(value["age"], int)
    assert isinstance(value["name"], str)
    assert free.ids == generate(engine, plain_again(plain))[0].ids  # neighbours are untouched


def plain_again(one):
    return request(one.prompt_ids, one.params.max_new_tokens)


def test_regex_grammar_gives_a_match(engine, smollm2) -> None:
    pattern = r"\d{3}-[a-f]{2}"
    result, *_ = generate(
        engine,
        request(
            encode(smollm2, "The code is "),
            30,
            grammar=Grammar(GrammarKind.REGEX, pattern),
            do_sample=True,
            seed=4,
            ignore_eos=False,
        ),
    )
    assert re.fullmatch(pattern, result.done.generated_text)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(GrammarKind.REGEX, "(unclosed"),
        Grammar(GrammarKind.JSON, "{not json"),
        Grammar(GrammarKind.JSON, '{"type": "no-such-type"}'),
    ],
    ids=str,
)
def test_bad_grammar_is_refused_at_submit(engine, grammar) -> None:
    with pytest.raises(InvalidInputError, match="grammar does not compile"):
        engine.submit(request([5], 4, grammar=grammar))


def test_grammar_that_fails_fails_its_request_only(engine, smollm2, monkeypatch) -> None:
    from bicl.frontends.http.engine.grammar import GrammarState

    def fails(self, token_id):
        raise RuntimeError("parser lost its way")

    monkeypatch.setattr(GrammarState, "advance", fails)
    grammar = Grammar(GrammarKind.REGEX, "[a-z]+")
    bad, good = generate(engine, request([5, 6], 4, grammar=grammar), request([5, 7], 4))
    assert isinstance(bad.last, RequestFailed)
    assert len(good.ids) == 4


# --- prompt log-probabilities ------------------------------------------------------------------
@pytest.mark.parametrize("length", [1, 33, 64, 130, 300])
def test_prefill_logprobs_are_complete_cold_and_warm(tiny, length: int) -> None:
    """(A7)"""
    ids = random_prompt(length, seed=length)
    with torch.inference_mode():
        logits = plain_twin(tiny)(torch.tensor([ids])).logits[0]
    expected = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0]
    with running(tiny, max_batch_prefill_tokens=100) as engine:
        for _ in range(2):
            (result,) = generate(engine, request(ids, 3, decoder_input_details=True))
            prefill = result.done.prefill
            assert [token.id for token in prefill] == ids
            assert prefill[0].logprob is None
            got = torch.tensor([token.logprob for token in prefill[1:]])
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
            assert result.done.usage.cached_tokens == 0
        (without,) = generate(engine, request(ids, 3))
        assert without.done.prefill == ()
        assert without.ids == result.ids


def test_prefill_logprobs_are_not_mixed_between_requests(tiny) -> None:
    """(A8)"""
    requests = [
        request(random_prompt(10 * n, seed=n), 2, decoder_input_details=True) for n in range(1, 17)
    ]
    with running(tiny, max_batch_prefill_tokens=200, max_batch_size=16) as engine:
        together = generate(engine, *requests)
        for one, result in zip(requests, together, strict=True):
            again = request(one.prompt_ids, 2, decoder_input_details=True)
            (alone,) = generate(engine, again)
            got, expected = (
                torch.tensor([t.logprob for t in r.done.prefill[1:]]) for r in (result, alone)
            )
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
            assert [t.id for t in result.done.prefill] == list(one.prompt_ids)


def test_prefill_logprobs_survive_a_preemption(tiny) -> None:
    requests = [
        request(random_prompt(100, seed=s), 60, decoder_input_details=True) for s in range(4)
    ]
    with running(tiny, num_pages=6, max_batch_size=4, max_total_tokens=256) as engine:
        results = generate(engine, *requests)
        assert engine.snapshot().preemptions > 0
    for one, result in zip(requests, results, strict=True):
        assert [t.id for t in result.done.prefill] == list(one.prompt_ids)


# --- draws -------------------------------------------------------------------------------------
def test_seeded_draws_are_the_same_alone_and_in_a_batch(tiny) -> None:
    options = {"do_sample": True, "temperature": 1.4, "top_p": 0.95, "seed": 42}
    ids = random_prompt(40, seed=1)
    with running(tiny) as engine:
        (alone,) = generate(engine, request(ids, 20, **options))
        batch = generate(
            engine,
            request(random_prompt(77, seed=2), 20, do_sample=True, seed=1),
            request(ids, 20, **options),
            request(random_prompt(5, seed=3), 20),
        )
        (other,) = generate(engine, request(ids, 20, **{**options, "seed": 43}))
    assert batch[1].ids == alone.ids != other.ids


def test_top_tokens_come_with_every_token(tiny) -> None:
    with running(tiny) as engine:
        (result,) = generate(engine, request(random_prompt(9, seed=1), 5, top_n_tokens=3))
    for event in result.tokens:
        assert len(event.top_tokens) >= 3
        assert event.top_tokens[0].id == event.token.id
        assert event.top_tokens[0].logprob == pytest.approx(event.token.logprob)


# --- stop sequences ----------------------------------------------------------------------------
def test_stop_sequence_ends_the_text_and_only_committed_tokens_are_cached(engine, smollm2) -> None:
    """(A63)"""
    prompt = encode(smollm2, "Count: one two three four five six seven eight nine ten eleven")
    (free,) = generate(engine, request(prompt, 40))
    stop = "".join(event.token.text for event in free.tokens[6:8])
    (kept,) = generate(engine, request(prompt, 40, stop=(stop,)))
    (cut,) = generate(engine, request(prompt, 40, stop=(stop,), include_stop=False))
    assert kept.done.finish_reason == cut.done.finish_reason == "stop_sequence"
    assert kept.done.generated_text == kept.text
    assert stop in kept.text
    assert stop not in cut.text
    assert cut.done.generated_text == cut.text == kept.text[: kept.text.index(stop)]
    following = prompt + cut.ids + encode(smollm2, " and then")
    (warm,) = generate(engine, request(following, 8))
    engine.flush_cache()
    (cold,) = generate(engine, request(following, 8))
    assert warm.ids == cold.ids
