"""What is kept of every page of a sparse layer, so that a query can judge it unread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from bicl.attention.pool import LayerCache

__all__ = ["GATE_DIM", "LayerIndex", "make_indexes"]

GATE_DIM = 128
"""Dimensions that the gate projects queries and keys to."""


@dataclass(frozen=True)
class LayerIndex:
    """One sparse layer's index.

    Attributes:
        layer: the pages it describes.
        vectors: ``[num_pages, H, 2, D]`` for ``bounds`` (minimum, maximum of each dim over the
            page's keys) or ``[num_pages, H, 1, R]`` for ``gate`` (their mean gated direction).
            Rows of pages that are not full hold anything.
        kind: ``bounds`` or ``gate``.
        query_weight, key_weight: ``[R, head_dim]`` projections of the gate; None for ``bounds``.
    """

    layer: LayerCache
    vectors: torch.Tensor
    kind: str
    query_weight: torch.Tensor | None = None
    key_weight: torch.Tensor | None = None

    @property
    def bytes_per_page(self) -> int:
        return self.vectors[0].numel() * self.vectors.element_size()


def make_indexes(
    layers: Mapping[int, LayerCache],
    kind: str,
    dtype: torch.dtype,
    *,
    weights: Mapping[int, tuple[torch.Tensor, torch.Tensor]] | None = None,
) -> dict[int, LayerIndex]:
    """Empty indexes.

    Args:
        layers: the sparse layers' pages, by layer number.
        kind: ``bounds`` or ``gate``.
        dtype: the model's; fp8 pages are indexed in it too.
        weights: for ``gate``: query and key projection of each layer, ``[R, head_dim]``.

    Returns:
        One index a layer, with zeros.
    """
    indexes = {}
    for number, layer in layers.items():
        layout = layer.layout
        query_weight, key_weight = (weights or {}).get(number, (None, None))
        planes, dims = (2, layout.head_dim) if kind == "bounds" else (1, GATE_DIM)
        shape = (layer.num_pages, layout.num_kv_heads, planes, dims)
        vectors = torch.zeros(shape, dtype=dtype, device=layer.device)
        indexes[number] = LayerIndex(layer, vectors, kind, query_weight, key_weight)
    return indexes
