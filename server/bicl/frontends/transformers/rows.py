"""The base of our caches, and what their ``update`` hands to the attention function."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NoReturn

import torch
from transformers.cache_utils import Cache

from bicl.errors import UnsupportedError

__all__ = ["LayerRows", "PagedCache"]


class LayerRows:
    """New rows of one layer on their way to its attention call; stands in for its keys.

    Attributes:
        cache: where they belong.
        layer_idx: which layer.
        key, value: ``[B, num_kv_heads, T, head_dim]``, of this step only.
        rotary: cos and sin, ``[T, R]``, by which queries and keys are still to be turned.
    """

    __slots__ = ("cache", "key", "layer_idx", "rotary", "value")

    def __init__(
        self, cache: PagedCache, layer_idx: int, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        self.cache = cache
        self.layer_idx = layer_idx
        self.key = key
        self.value = value
        self.rotary: tuple[torch.Tensor, torch.Tensor] | None = None


class PagedCache(Cache):
    """A transformers cache whose layers are not tensors to concatenate but pages to attend to.

    Attributes:
        rotates: its ``attend`` turns queries and keys by ``LayerRows.rotary``.
    """

    rotates = False

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(  # type: ignore[override]
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[LayerRows, torch.Tensor]:
        """Hand the step's rows on to the attention function, which alone knows the mask."""
        return LayerRows(self, layer_idx, key_states, value_states), value_states

    @abstractmethod
    def attend(
        self,
        rows: LayerRows,
        query: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        scale: float,
        window_left: int,
        softcap: float,
    ) -> torch.Tensor:
        """Store the rows, then attend: ``[B, num_q_heads, T, D]`` to ``[B, T, num_q_heads, D]``."""

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    # transformers asks these of the layers, of which there are none to ask. One answer for all of
    # them: full attention (windows are the attention function's affair).
    @property
    def is_sliding(self) -> list[bool]:
        return [False]

    @property
    def is_linear(self) -> list[bool]:
        return [False]

    @property
    def is_dummy(self) -> list[bool]:
        return [False]

    @property
    def is_croppable(self) -> bool:
        return False

    def _refuse(self, what: str) -> NoReturn:
        raise UnsupportedError(f"{type(self).__name__} does not offer {what}")

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._refuse("beam search")

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._refuse("repeating rows of the batch")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._refuse("selecting rows of the batch")

    def crop(self, tokens_to_remove: int) -> None:
        self._refuse("crop")

    def update_conv_state(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("convolution or state-space layers")

    update_recurrent_state = update_conv_state
    get_conv_state = update_conv_state
    get_recurrent_state = update_conv_state
    update_indexer = update_conv_state
