"""SmolLM2 through the engine against plain transformers with its own cache."""

from __future__ import annotations

import pytest
from support.driving import (
    assert_same_greedy,
    generate,
    greedy_reference,
    plain_twin,
    request,
    running,
)

NEW_TOKENS = 12
LENGTHS = [1, 63, 64, 65, 130, 1000]
TEXT = (
    "The history of the lighthouse begins with fires on hilltops. Mariners watched for them at "
    "night, and towns along the coast paid keepers to tend the flames through every storm. "
)


@pytest.fixture(scope="module")
def prompts(smollm2) -> list[list[int]]:
    ids = smollm2.tokenizer(TEXT * 40).input_ids
    return [ids[:length] for length in LENGTHS] + [ids[200:230], ids[7:300]]


@pytest.fixture(scope="module")
def references(smollm2, prompts):
    plain = plain_twin(smollm2)
    return [greedy_reference(plain, prompt, NEW_TOKENS) for prompt in prompts]


@pytest.fixture(scope="module")
def engine(smollm2):
    with running(
        smollm2, max_total_tokens=1100, max_batch_size=8, max_batch_prefill_tokens=1024
    ) as engine:
        yield engine


@pytest.mark.parametrize("index", range(len(LENGTHS)), ids=map(str, LENGTHS))
def test_greedy_equals_transformers_cold_and_warm(engine, prompts, references, index) -> None:
    """(A1, A2, A6)"""
    engine.flush_cache()
    runs = [generate(engine, request(prompts[index], NEW_TOKENS))[0] for _ in range(3)]
    for run in runs:
        assert_same_greedy(run.ids, *references[index])
    assert runs[1].ids == runs[2].ids  # warm runs equal each other exactly
    assert runs[0].done.usage.cached_tokens == 0
    assert LENGTHS[index] < 64 or runs[1].done.usage.cached_tokens > 0


@pytest.mark.parametrize("warm", [False, True])
def test_greedy_equals_transformers_eight_at_once(engine, prompts, references, warm) -> None:
    if not warm:
        engine.flush_cache()
    results = generate(engine, *[request(prompt, NEW_TOKENS) for prompt in prompts])
    for result, reference in zip(results, references, strict=True):
        assert_same_greedy(result.ids, *reference)


def test_text_is_what_the_tokenizer_says(engine, smollm2, prompts) -> None:
    (result,) = generate(engine, request(prompts[4], NEW_TOKENS))
    assert result.text == smollm2.tokenizer.decode(result.ids)
    assert result.done.generated_text == smollm2.tokenizer.decode(
        result.ids, skip_special_tokens=True
    )


def test_end_of_sequence_token_ends_a_chat(engine, smollm2) -> None:
    ids = smollm2.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Say hello."}], add_generation_prompt=True, return_dict=False
    )
    (result,) = generate(engine, request(ids, 60, ignore_eos=False))
    assert result.done.finish_reason == "eos_token"
    assert result.tokens[-1].token.special
    assert result.tokens[-1].token.text == "<|im_end|>"
    assert "<|im_end|>" not in result.done.generated_text
