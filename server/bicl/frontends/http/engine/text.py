"""From token ids to text, one token at a time, and when to stop."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from bicl.frontends.http.request import FinishReason, GenerationParams

__all__ = ["Detokenizer", "StopCheck"]

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
CONTEXT_TOKENS = 5
"""Prompt tokens decoded along with the first new one: a tokenizer may add or drop a space
depending on what stands before."""


class Detokenizer:
    """Text of a growing sequence.

    Bytes that do not yet make a character are held back until the token that completes it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        # Decoding is one call, and transformers' preparations for it take five times as long.
        self._plain = tokenizer.backend_tokenizer if _decodes_plainly(tokenizer) else None
        self._ids = list(prompt_ids[-CONTEXT_TOKENS:])
        self._num_context = len(self._ids)
        self._prefix = 0  # first token of the window that is decoded anew each time
        self._read = len(self._ids)  # tokens whose text was given out
        self._prefix_text: str | None = None

    def push(self, token_id: int) -> str:
        """Text that this token adds; empty while a character is incomplete."""
        self._ids.append(token_id)
        if self._prefix_text is None:
            self._prefix_text = self._decode(self._ids[self._prefix : self._read])
        text = self._decode(self._ids[self._prefix :])
        if len(text) <= len(self._prefix_text) or text.endswith(REPLACEMENT):
            return ""
        added = text[len(self._prefix_text) :]
        self._prefix, self._read = self._read, len(self._ids)
        self._prefix_text = None
        return added

    def text(self) -> str:
        """All generated text without special tokens."""
        first = max(0, self._num_context - 1)
        context = self._decode(self._ids[first : self._num_context], skip_special_tokens=True)
        return self._decode(self._ids[first:], skip_special_tokens=True)[len(context) :]

    def _decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        if self._plain is not None:
            plain: str = self._plain.decode(ids, skip_special_tokens=skip_special_tokens)
            return plain
        text = self._tokenizer.decode(
            ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text


def _decodes_plainly(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether its ``decode`` does no more than that of the file it was made from."""
    own, usual = type(tokenizer), PreTrainedTokenizerFast
    return isinstance(tokenizer, usual) and (own.decode, own._decode) == (
        usual.decode,
        usual._decode,
    )


@lru_cache(maxsize=256)
def _pattern(stop: tuple[str, ...], end: str) -> re.Pattern[str]:
    return re.compile("(?:" + "|".join(map(re.escape, stop)) + ")" + end)


class StopCheck:
    """TGI's rules in TGI's order: length, end-of-sequence token, stop sequences.

    With ``params.include_stop``, as in TGI, a stop sequence counts only where it ends the text
    after some token (or stands before a final newline), and stays part of the text. Without, it
    counts wherever it appears, is never given out, and text that may be its beginning is held back
    until that is decided.
    """

    def __init__(self, params: GenerationParams, eos_token_ids: frozenset[int]) -> None:
        self._max_new_tokens = params.max_new_tokens
        self._eos = frozenset() if params.ignore_eos else eos_token_ids
        self._stop = params.stop
        self.withholds = bool(params.stop) and not params.include_stop
        self._keep = max(map(len, params.stop), default=0)
        self._tail = ""  # enough of the text to find a stop sequence at its end
        self._held = ""
        self._num_tokens = 0
        self.matched = ""
        """The withheld stop sequence that ended the text, with what followed it in its token."""

    def push(self, token_id: int, text: str) -> tuple[FinishReason | None, str]:
        """Account for one token. Returns why to stop, if so, and the text to give out."""
        self._num_tokens += 1
        reason = self._reason(token_id)
        if not self.withholds:
            if reason is None and self._ends_with_stop(text):
                reason = FinishReason.STOP_SEQUENCE
            return reason, text
        self._held += text
        if match := _pattern(self._stop, "").search(self._held):
            self.matched = self._held[match.start() :]
            return FinishReason.STOP_SEQUENCE, self._held[: match.start()]
        keep = 0 if reason else self._possible_start()
        text, self._held = (
            self._held[: len(self._held) - keep],
            self._held[len(self._held) - keep :],
        )
        return reason, text

    def _reason(self, token_id: int) -> FinishReason | None:
        if self._num_tokens >= self._max_new_tokens:
            return FinishReason.LENGTH
        if token_id in self._eos:
            return FinishReason.EOS_TOKEN
        return None

    def _ends_with_stop(self, text: str) -> bool:
        if not self._stop:
            return False
        self._tail = (self._tail + text)[-(self._keep + len(text)) :]
        return _pattern(self._stop, "$").search(self._tail) is not None

    def _possible_start(self) -> int:
        """Length of the longest end of the held text that begins a stop sequence."""
        return max(
            (
                size
                for stop in self._stop
                for size in range(1, min(len(stop), len(self._held)) + 1)
                if stop.startswith(self._held[-size:])
            ),
            default=0,
        )
