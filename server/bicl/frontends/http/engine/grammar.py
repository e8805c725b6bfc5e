"""Constrained output: JSON schemas and regular expressions, by llguidance."""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from bicl.errors import InvalidInputError
from bicl.frontends.http.request import Grammar, GrammarKind

__all__ = ["GrammarCompiler", "GrammarState"]

CACHED_GRAMMARS = 64


class GrammarState:
    """Where one request stands in its grammar."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def allowed(self) -> torch.Tensor:
        """bool ``[vocab_size]``: tokens that may come next; never all False."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        mask = np.unpackbits(bits, bitorder="little", count=self._vocab_size)
        return torch.from_numpy(mask.view(bool))

    def advance(self, token_id: int) -> None:
        """Accept the token that was chosen."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token_id)
            self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InvalidInputError(f"grammar: {self._matcher.get_error()}")


class GrammarCompiler:
    """Compiles grammars for one tokenizer; thread-safe, and meant for the submitting thread."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = sorted(eos_token_ids)
        self._lock = threading.Lock()
        self._vocabulary: Any = None  # built at the first grammar: it takes about a second
        self._compiled = lru_cache(maxsize=CACHED_GRAMMARS)(self._compile)

    def start(self, grammar: Grammar) -> GrammarState:
        """A fresh state.

        Raises:
            InvalidInputError: the grammar does not compile; the message is the compiler's.
        """
        with self._lock:
            return GrammarState(self._compiled(grammar).deep_copy(), self._vocab_size)

    def _compile(self, grammar: Grammar) -> Any:
        import llguidance
        import llguidance.hf

        if self._vocabulary is None:
            self._vocabulary = llguidance.hf.from_tokenizer(
                self._tokenizer,  # type: ignore[arg-type]
                n_vocab=self._vocab_size,
                eos_token=self._eos or None,
            )
        matcher = llguidance.LLMatcher
        try:
            if grammar.kind is GrammarKind.JSON:
                source = matcher.grammar_from_json_schema(grammar.value)
            else:
                source = matcher.grammar_from_regex(grammar.value)
            compiled = matcher(self._vocabulary, source, log_level=0)
        except ValueError as error:
            raise InvalidInputError(f"{grammar.kind} grammar does not compile: {error}") from error
        if compiled.is_error():
            reason = compiled.get_error()
            raise InvalidInputError(f"{grammar.kind} grammar does not compile: {reason}")
        return compiled
