"""Incremental text and stop sequences."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_models import byte_tokenizer

from bicl.frontends.http.engine.text import Detokenizer, StopCheck
from bicl.frontends.http.request import FinishReason, GenerationParams

TOKENIZER = byte_tokenizer()
EOS = 2


def encode(text: str) -> list[int]:
    return TOKENIZER(text).input_ids


@settings(deadline=None, max_examples=60)
@given(prompt=st.text(max_size=8), text=st.text(max_size=30))
def test_pieces_add_up_to_the_text(prompt: str, text: str) -> None:
    """One token a byte, so most characters come in several tokens."""
    detokenizer = Detokenizer(TOKENIZER, encode(prompt))
    pieces = [detokenizer.push(token) for token in encode(text)]
    assert "".join(pieces) == text
    assert detokenizer.text() == text


def test_incomplete_character_is_held_back() -> None:
    detokenizer = Detokenizer(TOKENIZER, encode("x"))
    pieces = [detokenizer.push(token) for token in encode("a€b")]
    assert pieces == ["a", "", "", "€", "b"]


def test_special_tokens_show_in_pieces_but_not_in_the_text() -> None:
    detokenizer = Detokenizer(TOKENIZER, encode("x"))
    pieces = [detokenizer.push(token) for token in [*encode("hi"), EOS]]
    assert pieces[-1] == "<eos>"
    assert detokenizer.text() == "hi"


def feed(text: str, pieces: int | None = None, eos: bool = False, **options):
    """Feed text in tokens of ``pieces`` characters; returns the reason, the pieces, the rest."""
    check = StopCheck(GenerationParams(**{"max_new_tokens": 1000, **options}), frozenset({EOS}))
    size = pieces or 1
    out, reason = [], None
    for start in range(0, len(text), size):
        reason, piece = check.push(7, text[start : start + size])
        out.append(piece)
        if reason:
            return reason, out, check
    if eos:
        reason, piece = check.push(EOS, "")
        reason = reason if reason is FinishReason.STOP_SEQUENCE else None
        out.append(piece)
    return reason, out, check


@pytest.mark.parametrize(("size", "stops"), [(1, True), (11, True), (3, False)])
def test_stop_sequence_stays_in_the_text_as_in_tgi(size: int, stops: bool) -> None:
    """It counts only where a token ends with it."""
    reason, out, _ = feed("hello [END] and more", size, stop=("[END]",))
    assert reason is (FinishReason.STOP_SEQUENCE if stops else None)
    assert "".join(out) == ("hello [END]" if stops else "hello [END] and more")


@given(
    text=st.text("ab[END]", max_size=40),
    size=st.integers(1, 4),
    stop=st.sampled_from([("[END]",), ("ab", "[E"), ("aab",)]),
)
def test_withheld_stop_sequence_is_never_given_out(text: str, size: int, stop) -> None:
    """Not even its beginning; everything before it is. (A63)"""
    reason, out, check = feed(text, size, eos=True, stop=stop, include_stop=False)
    given_out = "".join(out)
    assert not any(s in given_out for s in stop)
    if reason is FinishReason.STOP_SEQUENCE:
        assert any(check.matched.startswith(s) for s in stop)
        assert text.startswith(given_out + check.matched)
    else:
        assert given_out == text


def test_withheld_text_is_streamed_as_soon_as_it_is_decided() -> None:
    """(A63)"""
    reason, out, _ = feed("a[EN]b[END]", stop=("[END]",), include_stop=False)
    assert reason is FinishReason.STOP_SEQUENCE
    assert out == ["a", "", "", "", "[EN]", "b", "", "", "", "", ""]


def test_stop_sequence_before_a_final_newline_counts() -> None:
    """As in TGI, whose pattern ends in ``$``."""
    check = StopCheck(GenerationParams(9, stop=("END",)), frozenset())
    assert check.push(7, "the END\n")[0] is FinishReason.STOP_SEQUENCE


def test_length_comes_before_the_other_reasons() -> None:
    check = StopCheck(GenerationParams(1, stop=("x",)), frozenset({EOS}))
    assert check.push(EOS, "x")[0] is FinishReason.LENGTH


def test_ignored_end_of_sequence_token() -> None:
    check = StopCheck(GenerationParams(5, ignore_eos=True), frozenset({EOS}))
    assert check.push(EOS, "")[0] is None


def test_special_characters_in_a_stop_sequence_are_literal() -> None:
    reason, out, _ = feed("a.b*c", stop=("b*",))
    assert reason is FinishReason.STOP_SEQUENCE
    assert "".join(out) == "a.b*"


def test_a_tokenizer_with_a_way_of_its_own_decodes_that_way() -> None:
    plain = byte_tokenizer()

    class Louder(type(plain)):
        def _decode(self, *args, **options):
            return super()._decode(*args, **options).upper()

    plain.__class__ = Louder
    detokenizer = Detokenizer(plain, encode("x"))
    assert "".join(map(detokenizer.push, encode("abc"))) == "ABC"
