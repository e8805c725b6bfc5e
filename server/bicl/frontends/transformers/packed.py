"""A model as an engine calls it: packed tokens and a step's metadata in, logits out."""

from __future__ import annotations

import inspect

import torch
from transformers import PreTrainedModel

from bicl.attention.metadata import AttentionMetadata
from bicl.frontends.transformers.cache import PackedCache
from bicl.frontends.transformers.geometry import cache_argument

__all__ = ["PackedModel"]


class PackedModel:
    """Calls a transformers decoder with one packed row of tokens.

    Args:
        model: loaded with ``attn_implementation="bicl"``.
        cache: of its pages.
    """

    def __init__(self, model: PreTrainedModel, cache: PackedCache) -> None:
        self._model = model
        self._cache = cache
        self._cache_argument = {cache_argument(model): cache}
        # Nearly every decoder can restrict its output layer to chosen rows; the others compute
        # all rows, from which the chosen ones are taken.
        self._selects = "logits_to_keep" in inspect.signature(model.forward).parameters

    @property
    def rotary_shape(self) -> tuple[int, int] | None:
        """See :class:`PackedCache`; known after a first step."""
        return self._cache.rotary_shape

    def __call__(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        meta: AttentionMetadata,
        logit_rows: torch.Tensor,
    ) -> torch.Tensor:
        """One forward step.

        Args:
            input_ids: int64 ``[T]``, the sequences of ``meta`` one after the other.
            positions: int64 ``[T]``.
            meta: what the rows are; their K and V are stored, then attended to.
            logit_rows: int64 ``[n]``, rows to put through the output layer.

        Returns:
            float32 ``[n, vocab_size]``.
        """
        self._cache.meta = meta
        self._cache.backend.plan(meta)
        with torch.inference_mode():
            logits: torch.Tensor = self._model(
                input_ids=input_ids[None],
                position_ids=positions[None],
                use_cache=True,
                **({"logits_to_keep": logit_rows} if self._selects else {}),
                **self._cache_argument,
            ).logits[0]
            if not self._selects:
                logits = logits[logit_rows]
            return logits.float()
