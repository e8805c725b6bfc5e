"""What follows the logits: choose tokens, make text of them, tell the streams, see who ends."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from bicl.attention.results import ResultCopies
from bicl.frontends.http.engine.plan import Chunk
from bicl.frontends.http.engine.sampler import Choice, Chosen, choose
from bicl.frontends.http.engine.sequence import LogitsNeed, Sequence
from bicl.frontends.http.request import (
    PrefillToken,
    RequestDone,
    RequestFailed,
    Token,
    TokenEvent,
)

__all__ = ["Emitter", "Last", "Ready"]

Last = RequestDone | RequestFailed


@dataclass(frozen=True)
class Ready:
    """Sequences whose next tokens are being chosen. ``chosen`` is None if there are none."""

    sequences: list[Sequence]
    chosen: Chosen | None


class Emitter:
    """Samples a step's rows and emits their tokens.

    Args:
        tokenizer: the model's.
        device: of the logits.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, device: torch.device) -> None:
        self._tokenizer = tokenizer
        self._copies = ResultCopies(device)
        self._special = frozenset(tokenizer.all_special_ids)

    def choose(self, chunks: SequenceOf[Chunk], logits: torch.Tensor) -> Ready:
        """Begin to choose a token for every chunk that computed its sequence's last one.

        Args:
            chunks: of the step.
            logits: their rows, as :meth:`ModelRunner.forward` returned them; overwritten.
        """
        ready, rows = [], []
        row = 0
        for chunk in chunks:
            size = chunk.num_logits
            if chunk.logits is LogitsNeed.ALL:
                self._add_prefill(chunk, logits[row : row + size])
            row += size
            if size and chunk.start + chunk.count == len(chunk.sequence.ids):
                ready.append(chunk.sequence)
                rows.append(row - 1)
        if not ready:
            return Ready([], None)
        if len(rows) != logits.shape[0]:
            logits = logits[rows]
        states, histories = [s.sampling for s in ready], [s.ids for s in ready]
        return Ready(ready, choose(logits, states, histories, self._copies))

    def emit(self, ready: Ready) -> tuple[int, list[tuple[Sequence, Last]]]:
        """Wait for the tokens and tell the streams.

        Returns:
            How many tokens were chosen; sequences that ended, with the event that is
            still to be put on their streams.
        """
        if ready.chosen is None:
            return 0, []
        ended = []
        for sequence, choice in zip(ready.sequences, ready.chosen.read(), strict=True):
            try:
                last = self._advance(sequence, choice)
            except Exception as error:  # its own grammar or text; the others go on
                last = RequestFailed(error)
            if last is not None:
                ended.append((sequence, last))
        return len(ready.sequences), ended

    def _advance(self, sequence: Sequence, choice: Choice) -> Last | None:
        if choice.error is not None:
            return RequestFailed(choice.error)
        token_id = choice.token_id
        sequence.ids.append(token_id)
        grammar = sequence.sampling.grammar
        if grammar is not None:
            grammar.advance(token_id)
        special = token_id in self._special
        text = sequence.detokenizer.push(token_id)
        reason, text = sequence.stop.push(
            token_id, "" if special and sequence.stop.withholds else text
        )
        # Text that was held back until a special token came is no special text.
        token = Token(token_id, text, choice.logprob, special and not sequence.stop.withholds)
        top = tuple(
            Token(i, self._text_of(i), logprob, i in self._special) for i, logprob in choice.top
        )
        sequence.stream.put(TokenEvent(token, top, last=reason is not None))
        if reason is None:
            return None
        full = sequence.detokenizer.text()
        return RequestDone(
            finish_reason=reason,
            generated_text=full.removesuffix(sequence.stop.matched),
            usage=sequence.usage(),
            prefill=tuple(sequence.prefill),
        )

    def _add_prefill(self, chunk: Chunk, logits: torch.Tensor) -> None:
        """Log-probabilities of the prompt tokens that follow the chunk's."""
        sequence = chunk.sequence
        if chunk.start == 0:
            first = sequence.ids[0]
            sequence.prefill.append(PrefillToken(first, self._text_of(first), None))
        following = sequence.ids[chunk.start + 1 : chunk.start + chunk.count + 1]
        if not following:
            return
        scores = torch.log_softmax(logits[: len(following)], dim=-1)
        ids = torch.tensor(following, device=logits.device)
        values = scores.gather(1, ids[:, None]).squeeze(1).tolist()
        sequence.prefill += [
            PrefillToken(i, self._text_of(i), value)
            for i, value in zip(following, values, strict=True)
        ]

    def _text_of(self, token_id: int) -> str:
        text = self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text
