"""What is kept of every page of a sparse layer, so that a query can judge it unread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch.nn import functional as F

from bicl.attention.pool import LayerCache
from bicl.cache.layout import PageLayout
from bicl.sparse.sgm import (
    CENTROID_TOKENS,
    GATE_DIM,
    PAGE_GATES,
    Gate,
    PageGate,
    check_gate,
    make_gate,
)

__all__ = ["LayerIndex", "as_bytes", "index_bytes", "index_dtype", "make_indexes", "round_rows"]

SIZE_DIMS = 16
"""Behind a centroid: the logarithm of its cluster's size, and zeros; 16 bytes, as kernels read."""
CENTROID_DTYPE = torch.float8_e4m3fn


@dataclass(frozen=True)
class LayerIndex:
    """One sparse layer's index.

    Attributes:
        layer: the pages it describes.
        vectors: ``[num_pages, H, rows, dims]``: for ``centroids`` the means of clusters of the
            page's keys in e4m3, each with the logarithm of its size and zeros behind it; for
            ``bounds`` minimum and maximum of each dim over the page's keys; for ``gate`` one row,
            the mean of their gated directions. Rows of pages that are not full hold anything.
        kind: ``centroids``, ``bounds`` or ``gate``.
        weights: float32 ``[sets, D]``, of the dims of ``centroids`` or of the boxes' centres and
            half widths.
        query_weight, key_weight: ``[R, D]``, the gate's projections in the model's dtype.
        sharpness: what the gate's cosine is multiplied by to be compared in a softmax.
    """

    layer: LayerCache
    vectors: torch.Tensor
    kind: str
    weights: torch.Tensor
    query_weight: torch.Tensor | None = None
    key_weight: torch.Tensor | None = None
    sharpness: float = 1.0

    @property
    def bytes_per_page(self) -> int:
        return self.vectors[0].numel() * self.vectors.element_size()

    def describe(self, keys: torch.Tensor) -> torch.Tensor:
        """Rows of ``vectors`` for full pages of keys, float32 ``[n, H, page_size, D]``."""
        if self.kind in PAGE_GATES:
            rows = PAGE_GATES[self.kind].describe(keys)
        else:
            assert self.key_weight is not None
            gated = (keys.to(self.key_weight.dtype) @ self.key_weight.t()).float()
            rows = F.normalize(gated, dim=-1).mean(dim=2, keepdim=True)
        rows = F.pad(rows, (0, self.vectors.shape[-1] - rows.shape[-1]))
        return round_rows(rows, self.vectors.dtype)

    def put(self, pages: torch.Tensor, rows: torch.Tensor) -> None:
        """Write rows (:meth:`describe`) of ``pages``, int64 ``[n]``."""
        as_bytes(self.vectors).index_copy_(0, pages, as_bytes(rows))

    def score(self, query: torch.Tensor, vectors: torch.Tensor, scale: float) -> torch.Tensor:
        """float32 ``[B, Hq, W]`` of ``query`` ``[B, Hq, D]`` against rows of the index,
        ``[B, H, W, rows, dims]``."""
        if self.kind in PAGE_GATES:
            return PAGE_GATES[self.kind].score(query, vectors, self.weights, scale)
        assert self.query_weight is not None
        gated = (query.to(self.query_weight.dtype) @ self.query_weight.t()).float()
        direction = F.normalize(gated, dim=-1).view(
            len(query), vectors.shape[1], -1, gated.shape[2]
        )
        cosine = torch.einsum("bhgr,bhwr->bhgw", direction, vectors[:, :, :, 0].float())
        return cosine.reshape(len(query), query.shape[1], -1) * self.sharpness


def index_bytes(layout: PageLayout, kind: str, dtype: torch.dtype) -> int:
    """Bytes of one page's index in one layer of a model of ``dtype``."""
    return layout.num_kv_heads * prod(_shape(layout, kind)) * index_dtype(kind, dtype).itemsize


def index_dtype(kind: str, dtype: torch.dtype) -> torch.dtype:
    """What a model of ``dtype`` keeps its index in."""
    return CENTROID_DTYPE if kind == "centroids" else dtype


def round_rows(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """To an index's dtype, the greatest value at most: e4m3 ends at 448."""
    limit = torch.finfo(dtype).max
    return rows.clamp(-limit, limit).to(dtype)


def as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """A view that torch can move about: few of its operations know e4m3."""
    return rows.view(torch.uint8) if rows.element_size() == 1 else rows


def make_indexes(
    layers: Mapping[int, LayerCache],
    kind: str,
    dtype: torch.dtype,
    gate: Gate | None = None,
) -> dict[int, LayerIndex]:
    """Empty indexes, one a layer.

    Args:
        layers: the sparse layers' pages, by layer number.
        kind: ``centroids``, ``bounds`` or ``gate``.
        dtype: the model's; fp8 pages are indexed in it too.
        gate: a fitted one; None takes the analytic start.

    Raises:
        ConfigError: the gate was made for other layers, another head_dim or another kind.
    """
    if not layers:
        return {}
    head_dim = next(iter(layers.values())).layout.head_dim
    gate = make_gate(kind, tuple(layers), head_dim) if gate is None else gate
    check_gate(gate, kind, tuple(layers), head_dim)
    return {number: _make_index(number, layer, dtype, gate) for number, layer in layers.items()}


def _make_index(number: int, layer: LayerCache, dtype: torch.dtype, gate: Gate) -> LayerIndex:
    layout, device = layer.layout, layer.device
    shape = (layer.num_pages, layout.num_kv_heads, *_shape(layout, gate.kind))
    vectors = torch.zeros(shape, dtype=index_dtype(gate.kind, dtype), device=device)
    if isinstance(gate, PageGate):
        weights = gate.weights_of(number).detach().to(device).contiguous()
        return LayerIndex(layer, vectors, gate.kind, weights)
    return LayerIndex(
        layer,
        vectors,
        gate.kind,
        torch.empty(0, device=device),
        gate.matrix("query").detach().to(device, dtype),
        gate.matrix("key").detach().to(device, dtype),
        float(gate.sharpness.detach()),
    )


def _shape(layout: PageLayout, kind: str) -> tuple[int, int]:
    """Rows of a page and KV head, and their length."""
    if kind == "centroids":
        return layout.page_size // CENTROID_TOKENS, layout.head_dim + SIZE_DIMS
    return (2, layout.head_dim) if kind == "bounds" else (1, GATE_DIM)
