"""What HySparse asks of a prompt's text: its kind, and where its parts begin."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from bicl.errors import ConfigError, InvalidInputError
from bicl.frontends.http.request import GenerationRequest
from bicl.sparse.config import HySparseConfig
from bicl.sparse.guard import Guard, GuardBounds
from bicl.sparse.policy import KindRule, classify
from bicl.sparse.row import SparseRow
from bicl.sparse.syntax import boundaries, require_parser, to_tokens

__all__ = ["PromptReader"]

SAMPLE_TOKENS = 8192
"""Of a prompt, for its kind."""


class PromptReader:
    """Makes the state of a request from its wishes, the server's settings and its text.

    Args:
        config: of the server.
        bounds: of its live signals.
        tokenizer: of the model.

    Raises:
        ConfigError: syntax awareness without its parser.
    """

    def __init__(
        self, config: HySparseConfig, bounds: GuardBounds, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        if config.enable_sg:
            require_parser()
        self._config = config
        self._bounds = bounds
        self._tokenizer = tokenizer

    def begin(self, request: GenerationRequest) -> SparseRow:
        """A request's own ratio holds as it is; of the server's, some kinds of text get less, or
        more newest windows.

        Raises:
            InvalidInputError: syntax awareness without its parser.
        """
        config, asked = self._config, request.params.sparse
        aware = config.enable_sg if asked.enable_sg is None else asked.enable_sg
        given = asked.sparsity_ratio
        ratio = config.sparsity_ratio if given is None else given
        if ratio == 0.0 or len(request.prompt_ids) <= config.floor_tokens:
            return SparseRow(ratio, Guard(self._bounds))  # nothing to leave out of it yet
        kind = self._kind(request) if given is None or aware else ""
        rule = config.kind_rule(kind) if given is None else KindRule()
        places = self._boundaries(request, kind == "code") if aware else ()
        return SparseRow(
            ratio * rule.share,
            Guard(self._bounds),
            kind=kind,
            windows=rule.windows,
            boundaries=places,
        )

    def _kind(self, request: GenerationRequest) -> str:
        if self._config.text_kind != "auto":
            return "" if self._config.text_kind == "off" else self._config.text_kind
        return classify(self._text(request.prompt_ids[:SAMPLE_TOKENS]))

    def _boundaries(self, request: GenerationRequest, code: bool) -> tuple[int, ...]:
        try:
            require_parser()
        except ConfigError as error:
            raise InvalidInputError(str(error)) from None
        text = self._text(request.prompt_ids)
        places = boundaries(text, code=code)
        return tuple(to_tokens(places, self._starts(text, len(request.prompt_ids))))

    def _text(self, ids: tuple[int, ...]) -> str:
        text = self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def _starts(self, text: str, num_tokens: int) -> list[int]:
        """First character of each token. Text that does not give the prompt's tokens back (a few
        tokenizers clean up) is laid over them evenly."""
        found = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        starts = [start for start, _ in found["offset_mapping"]]
        if len(starts) == num_tokens:
            return starts
        return [len(text) * token // num_tokens for token in range(num_tokens)]
