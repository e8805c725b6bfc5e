"""Computes prompt tokens whose keys and values should be in a request's pages, but are not.

TGI's own code does it: a prefill of the prompt's front, cut to what a step may hold, whose next
token nobody wants. Afterwards the request is as the router believes it to be, so that its budget,
chunks and drafts stay right, and no step is larger than the shard was warmed up for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["CatchUp"]


class CatchUp:
    """Writes spans of prompts into their pages.

    Args:
        from_tokenized: TGI's ``FlashCausalLMBatch.from_tokenized``, a plain function.
        generate_token: TGI's ``FlashCausalLM.generate_token``.
    """

    def __init__(
        self, from_tokenized: Callable[..., Any], generate_token: Callable[..., Any]
    ) -> None:
        self._from_tokenized = from_tokenized
        self._generate_token = generate_token

    def compute(
        self, model: Any, request: Any, token_ids: Sequence[int], start: int, end: int
    ) -> None:
        """Fill the slots of tokens ``start .. end`` of a request that is not running yet."""
        from text_generation_server.utils.prefill_chunking import get_max_prefill_tokens

        longest = get_max_prefill_tokens() or end - start
        while start < end:
            stop = min(end, start + longest)
            self._compute_piece(model, request, token_ids[:stop], start)
            start = stop

    def _compute_piece(
        self, model: Any, request: Any, token_ids: Sequence[int], start: int
    ) -> None:
        from text_generation_server.pb import generate_pb2 as pb

        piece = pb.Request()
        piece.CopyFrom(request)
        # Greedy, without grammar or penalties: the token is thrown away.
        piece.parameters.CopyFrom(
            pb.NextTokenChooserParameters(
                temperature=1.0, top_p=1.0, typical_p=1.0, repetition_penalty=1.0
            )
        )
        piece.stopping_parameters.CopyFrom(pb.StoppingCriteriaParameters(max_new_tokens=1))
        piece.top_n_tokens, piece.prefill_logprobs = 0, False
        piece.cache_len = start
        if piece.HasField("chunk_len"):
            piece.chunk_len = len(token_ids) - start
        batch = self._from_tokenized(
            model.batch_type,
            pb.Batch(id=request.id, requests=[piece], size=1),
            model.tokenizer,
            [list(token_ids)],
            model.dtype,
            model.device,
        )
        self._generate_token(model, batch)
