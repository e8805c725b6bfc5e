"""A rotation that is done where keys are stored."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["Rotary"]


class Rotary(NamedTuple):
    """Queries and keys of a step that have not been turned yet; see ``AttentionBackend.store``.

    Dims ``i`` and ``i + R / 2`` of each head turn together, in float32, rounded once.

    Attributes:
        query: ``[T, num_q_heads, head_dim]``, turned in place.
        cos, sin: ``[T, R]``.
    """

    query: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
