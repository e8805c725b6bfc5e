"""Texts of the shorter way are those of transformers' own."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest

from bicl.frontends.tgi.texts import decode_directly

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

PIECES = ["a", "b'", ".", "?", "!", ",", "'", "n't", "'m", "'s", "'ve", "'re", "nth", "", "é"]
SPECIAL = ["<pad>", "<eos>"]


def make_tokenizer(kind: Any = None, **options: Any) -> Any:
    words = {word: i for i, word in enumerate(dict.fromkeys([*SPECIAL, *PIECES]))}
    model = tokenizers.models.WordLevel(words, unk_token="<pad>")
    kind = kind or transformers.PreTrainedTokenizerFast
    return kind(
        tokenizer_object=tokenizers.Tokenizer(model),
        pad_token="<pad>",
        eos_token="<eos>",
        **options,
    )


def id_lists(size: int) -> list[list[int]]:
    """Every list of up to two ids, some beyond the vocabulary, and longer ones at random."""
    ids = range(size + 2)
    short = [list(each) for n in range(3) for each in itertools.product(ids, repeat=n)]
    chance = random.Random(3)
    return short + [chance.choices(ids, k=chance.randint(3, 40)) for _ in range(200)]


@pytest.mark.parametrize("clean_up", [False, True])
@pytest.mark.parametrize("skip", [False, True])
def test_texts_are_equal(clean_up: bool, skip: bool) -> None:
    plain, direct = (
        make_tokenizer(clean_up_tokenization_spaces=clean_up, unk_token="<pad>") for _ in range(2)
    )
    assert decode_directly(direct)
    for ids in id_lists(len(plain)):
        expected = plain.decode(ids, skip_special_tokens=skip)
        assert direct.decode(ids, skip_special_tokens=skip) == expected, ids


def test_other_arguments_go_transformers_way() -> None:
    plain, direct = make_tokenizer(), make_tokenizer()
    assert decode_directly(direct)
    for ids in (3, np.array([2, 4]), (2, 4), []):
        assert direct.decode(ids) == plain.decode(ids)
    cleaned = plain.decode([2, 4], clean_up_tokenization_spaces=True)
    assert direct.decode([2, 4], clean_up_tokenization_spaces=True) == cleaned
    assert direct.batch_decode([[2, 4], [5]]) == plain.batch_decode([[2, 4], [5]])


def test_a_tokenizer_of_another_kind_stays_as_it_is() -> None:
    class Own(transformers.PreTrainedTokenizerFast):  # type: ignore[name-defined, misc]
        def _decode(self, *arguments: Any, **options: Any) -> str:
            return "own"

    tokenizer = make_tokenizer(Own)
    assert not decode_directly(tokenizer)
    assert tokenizer.decode([2]) == "own"
    assert not decode_directly(object())


def test_it_is_done_once() -> None:
    tokenizer = make_tokenizer()
    assert decode_directly(tokenizer)
    assert not decode_directly(tokenizer)
