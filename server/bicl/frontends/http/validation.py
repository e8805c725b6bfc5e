"""From TGI's request parameters to the engine's: rules, order and messages of TGI 3.3.7."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError

from bicl.config import ServerConfig
from bicl.errors import ConfigError
from bicl.frontends.http.errors import validation_error
from bicl.frontends.http.request import GenerationParams, Grammar, GrammarKind, SparseOptions
from bicl.frontends.http.schemas.generate import (
    GenerateParameters,
    GenerateRequest,
    GrammarType,
    HySparseParameters,
    JsonGrammar,
    RegexGrammar,
)
from bicl.frontends.http.tokenization import TextTokenizer

__all__ = ["ValidRequest", "Validator"]

# TGI plans at most this many new tokens at a time, and checks only those against the limit.
PLANNED_NEW_TOKENS = 1024


@dataclass(frozen=True)
class ValidRequest:
    """A request that may go to the engine.

    ``slow_to_submit``: a grammar is compiled first, or HySparse reads the prompt's text.
    """

    prompt_ids: tuple[int, ...]
    params: GenerationParams
    slow_to_submit: bool = False

    @property
    def input_length(self) -> int:
        return len(self.prompt_ids)

    @property
    def reported_seed(self) -> int | None:
        """TGI names the seed only where sampling used it."""
        return self.params.seed if self.params.do_sample else None


class Validator:
    """Checks requests against a resolved configuration."""

    def __init__(self, config: ServerConfig, tokenizer: TextTokenizer) -> None:
        assert config.max_input_tokens is not None
        assert config.max_total_tokens is not None
        self._config = config
        self._tokenizer = tokenizer
        self._hysparse = config.hysparse.resolve()
        self._max_input = config.max_input_tokens
        self._max_total = config.max_total_tokens

    def check_best_of(self, best_of: int) -> None:
        limit = self._config.max_best_of
        if limit == 1 and best_of != 1:
            raise validation_error("`best_of` != 1 is not allowed for this endpoint")
        if best_of > limit:
            raise validation_error(f"`best_of` must be > 0 and <= {limit}. Given: {best_of}")

    async def validate(self, request: GenerateRequest, add_special_tokens: bool) -> ValidRequest:
        """Raises:
        WireError: 422 with TGI's message for the first rule that is broken.
        """
        given = request.parameters
        self._check_parameters(given)
        if not request.inputs:
            raise validation_error("`inputs` cannot be empty")
        self._check_truncate(given.truncate)
        encoding = await self._tokenizer.encode(request.inputs, add_special_tokens)
        prompt_ids = tuple(encoding.ids)
        if given.truncate is not None:
            prompt_ids = prompt_ids[-given.truncate :]
        if not prompt_ids:
            raise validation_error("`inputs` cannot be empty")
        max_new_tokens = self._check_length(len(prompt_ids), given.max_new_tokens)
        params = self._params(given, max_new_tokens)
        sparse = self._hysparse
        is_read = sparse is not None and len(prompt_ids) > sparse.floor_tokens
        return ValidRequest(prompt_ids, params, is_read or params.grammar is not None)

    def _check_parameters(self, given: GenerateParameters) -> None:
        best_of = 1 if given.best_of is None else given.best_of
        if best_of > 1 and not _asks_for_sampling(given):
            raise validation_error("you must use sampling when `best_of` is > 1")
        if given.temperature is not None and given.temperature <= 0:
            raise validation_error("`temperature` must be strictly positive")
        if given.repetition_penalty is not None and given.repetition_penalty <= 0:
            raise validation_error("`repetition_penalty` must be strictly positive")
        if given.frequency_penalty is not None and not -2 <= given.frequency_penalty <= 2:
            raise validation_error("`frequency_penalty` must be >= -2.0 and <= 2.0")
        if given.top_p is not None and not 0 < given.top_p < 1:
            raise validation_error("`top_p` must be > 0.0 and < 1.0")
        if given.typical_p is not None and not 0 < given.typical_p < 1:
            raise validation_error("`typical_p` must be > 0.0 and < 1.0")
        if given.top_k is not None and given.top_k <= 0:
            raise validation_error("`top_k` must be strictly positive")
        if given.max_new_tokens == 0:
            raise validation_error("`max_new_tokens` must be strictly positive")
        self._check_counts(given, best_of)

    def _check_counts(self, given: GenerateParameters, best_of: int) -> None:
        stops, limit = len(given.stop), self._config.max_stop_sequences
        if stops > limit:
            raise validation_error(f"`stop` supports up to {limit} stop sequences. Given: {stops}")
        if given.seed is not None and best_of > 1:
            raise validation_error("`seed` must not be set when `best_of` > 1")
        top_n, limit = given.top_n_tokens or 0, self._config.max_top_n_tokens
        if top_n > limit:
            raise validation_error(f"`top_n_tokens` must be >= 0 and <= {limit}. Given: {top_n}")

    def _check_truncate(self, truncate: int | None) -> None:
        if truncate is not None and not 0 < truncate <= self._max_input:
            raise validation_error(
                f"`truncate` must be strictly positive and less than {self._max_input}. "
                f"Given: {truncate}"
            )

    def _check_length(self, input_length: int, asked: int | None) -> int:
        """New tokens that the request gets; no more than ever fit."""
        room = max(0, self._max_total - input_length)
        planned = min(room if asked is None else asked, PLANNED_NEW_TOKENS)
        if input_length + planned > self._max_total:
            raise validation_error(
                f"`inputs` tokens + `max_new_tokens` must be <= {self._max_total}. Given: "
                f"{input_length} `inputs` tokens and {planned} `max_new_tokens`"
            )
        if input_length > self._max_input:
            raise validation_error(
                f"`inputs` must have less than {self._max_input} tokens. Given: {input_length}"
            )
        return room if asked is None else min(asked, room)

    def _params(self, given: GenerateParameters, max_new_tokens: int) -> GenerationParams:
        def value(number: float | None, neutral: float) -> float:
            return neutral if number is None else number

        return GenerationParams(
            max_new_tokens=max_new_tokens,
            do_sample=given.do_sample or _warps(given),
            temperature=value(given.temperature, 1.0),
            top_k=given.top_k or 0,
            top_p=value(given.top_p, 1.0),
            typical_p=value(given.typical_p, 1.0),
            repetition_penalty=value(given.repetition_penalty, 1.0),
            frequency_penalty=value(given.frequency_penalty, 0.0),
            seed=secrets.randbits(64) if given.seed is None else given.seed,
            stop=_distinct(given.stop),
            watermark=given.watermark,
            grammar=None if given.grammar is None else self._grammar(given.grammar),
            top_n_tokens=given.top_n_tokens or 0,
            decoder_input_details=(
                given.decoder_input_details and self._config.enable_prefill_logprobs
            ),
            sparse=self._sparse(given.hy_sparse_config),
        )

    def _sparse(self, given: HySparseParameters | None) -> SparseOptions:
        if given is None:
            return SparseOptions()
        asked = given.model_dump(exclude_none=True)
        if self._hysparse is None:
            if any(asked.values()):
                raise validation_error(
                    "`hy_sparse_config` is not supported: the server runs without --enable-hysparse"
                )
            return SparseOptions()
        try:
            self._hysparse.for_request(asked)
        except ConfigError as error:
            raise validation_error(f"`hy_sparse_config`: {error}") from None
        return SparseOptions(**asked)

    def _grammar(self, grammar: GrammarType) -> Grammar:
        if self._config.disable_grammar_support:
            raise validation_error("grammar is not supported")
        if isinstance(grammar, RegexGrammar):
            return Grammar(GrammarKind.REGEX, grammar.value)
        if isinstance(grammar, JsonGrammar):
            schema = _parse_schema(grammar.value)
        else:
            schema = grammar.value.json_schema
        _check_schema(schema)
        return Grammar(GrammarKind.JSON, json.dumps(schema, ensure_ascii=False))


def _asks_for_sampling(given: GenerateParameters) -> bool:
    knobs = (given.temperature, given.top_k, given.top_p, given.typical_p)
    return given.do_sample or any(knob is not None for knob in knobs)


def _warps(given: GenerateParameters) -> bool:
    """Whether a parameter other than ``do_sample`` makes the shard sample."""
    return (
        given.temperature not in (None, 1.0)
        or given.top_k is not None
        or given.top_p is not None
        or given.typical_p is not None
    )


def _distinct(stop: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(stop))


def _parse_schema(value: Any) -> Any:
    if isinstance(value, dict):
        return value
    if not isinstance(value, str):
        raise validation_error("grammar is not supported")
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise validation_error(f"grammar is not valid: {error}") from None


def _check_schema(schema: Any) -> None:
    try:
        Draft202012Validator.check_schema(schema)
    except (SchemaError, RecursionError) as error:
        text = error.message if isinstance(error, SchemaError) else "too deeply nested"
        raise validation_error(f"grammar is not valid: {text}") from None
    if not isinstance(schema, dict) or "properties" not in schema:
        raise validation_error("grammar is not valid: Grammar must have a 'properties' field")
