"""What is kept of every page of a sparse layer, so that a query can judge it unread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch.nn import functional as F

from bicl.attention.pool import LayerCache
from bicl.cache.layout import PageLayout
from bicl.ops.cpu.sparse import EMPTY
from bicl.sparse.sgm import (
    CENTROID_TOKENS,
    GATE_DIM,
    PAGE_GATES,
    Gate,
    PageGate,
    check_gate,
    make_gate,
)

__all__ = ["LayerIndex", "index_bytes", "make_indexes", "unpack_centroids"]


@dataclass(frozen=True)
class LayerIndex:
    """One sparse layer's index.

    Attributes:
        layer: the pages it describes.
        vectors: a record a page; those of pages that are not full hold anything. ``centroids``:
            uint8 ``[num_pages, n]``, of which e4m3 ``[H, C, D16]`` are the means of clusters of the
            page's keys (D16: D rounded up to 16, with zeros), then uint8 ``[H, C]`` the keys in
            each, then nothing up to a multiple of 16. ``bounds``: ``[num_pages, H, 2, D]``, minimum
            and maximum of each dim over the keys. ``gate``: ``[num_pages, H, 1, R]``, the mean of
            their gated directions. The latter two are of the model's dtype.
        kind: ``centroids``, ``bounds`` or ``gate``.
        dtype: the model's.
        weights: float32 ``[sets, D]``, of the dims of ``centroids`` or of the boxes' centres and
            half widths.
        query_weight, key_weight: ``[R, D]``, the gate's projections in the model's dtype.
        sharpness: what the gate's cosine is multiplied by to be compared in a softmax.
        share: of a row's sparsity, which this layer leaves out; over the layers 1 on average.
    """

    layer: LayerCache
    vectors: torch.Tensor
    kind: str
    dtype: torch.dtype
    weights: torch.Tensor
    query_weight: torch.Tensor | None = None
    key_weight: torch.Tensor | None = None
    sharpness: float = 1.0
    share: float = 1.0

    @property
    def bytes_per_page(self) -> int:
        return self.vectors[0].numel() * self.vectors.element_size()

    def describe(self, keys: torch.Tensor) -> torch.Tensor:
        """Records of full pages of keys, float32 ``[n, H, page_size, D]``."""
        if self.kind in PAGE_GATES:
            rows = PAGE_GATES[self.kind].describe(keys)
            return _pack_centroids(rows) if self.kind == "centroids" else rows.to(self.dtype)
        assert self.key_weight is not None
        gated = (keys.to(self.key_weight.dtype) @ self.key_weight.t()).float()
        return F.normalize(gated, dim=-1).mean(dim=2, keepdim=True).to(self.dtype)

    def score(self, query: torch.Tensor, vectors: torch.Tensor, scale: float) -> torch.Tensor:
        """float32 ``[B, Hq, W]`` of ``query`` ``[B, Hq, D]`` against records, ``[B, W, ...]``."""
        if self.kind == "centroids":
            vectors = unpack_centroids(vectors, self.layer.layout)
        vectors = vectors.transpose(1, 2)  # [B, H, W, rows, dims]
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
    return prod(_shape(layout, kind)) * _stored(kind, dtype).itemsize


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
        dtype: the model's.
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
    shape = (layer.num_pages, *_shape(layout, gate.kind))
    vectors = torch.zeros(shape, dtype=_stored(gate.kind, dtype), device=device)
    if isinstance(gate, PageGate):
        weights = gate.weights_of(number).detach().to(device).contiguous()
        share = gate.share_of(number)
        return LayerIndex(layer, vectors, gate.kind, dtype, weights, share=share)
    return LayerIndex(
        layer,
        vectors,
        gate.kind,
        dtype,
        torch.empty(0, device=device),
        gate.matrix("query").detach().to(device, dtype),
        gate.matrix("key").detach().to(device, dtype),
        float(gate.sharpness.detach()),
    )


def _stored(kind: str, dtype: torch.dtype) -> torch.dtype:
    return torch.uint8 if kind == "centroids" else dtype


def _shape(layout: PageLayout, kind: str) -> tuple[int, ...]:
    """Of one page's record."""
    if kind == "centroids":
        rows = prod(_centroids(layout))
        return (rows * _up_to_16(layout.head_dim) + _up_to_16(rows),)
    rows_and_dims = (2, layout.head_dim) if kind == "bounds" else (1, GATE_DIM)
    return (layout.num_kv_heads, *rows_and_dims)


def _centroids(layout: PageLayout) -> tuple[int, int]:
    """Of one page: heads, and those of each."""
    return layout.num_kv_heads, layout.page_size // CENTROID_TOKENS


def _up_to_16(size: int) -> int:
    return -(-size // 16) * 16


def _pack_centroids(rows: torch.Tensor) -> torch.Tensor:
    """Records of ``centroid_rows``, float32 ``[n, H, C, D + 1]``."""
    means, counts = rows[..., :-1], rows[..., -1].exp().round().byte()
    padded = F.pad(means, (0, -means.shape[-1] % 16)).to(torch.float8_e4m3fn)
    packed = torch.cat((padded.view(torch.uint8).flatten(1), counts.flatten(1)), dim=1)
    return F.pad(packed, (0, -counts[0].numel() % 16))


def unpack_centroids(records: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    """``centroid_rows``, float32 ``[..., H, C, D + 1]``, of records uint8 ``[..., n]``."""
    shape: tuple[int, ...] = _centroids(layout)
    rows, row_bytes = prod(shape), _up_to_16(layout.head_dim)
    means = records[..., : rows * row_bytes].contiguous().view(torch.float8_e4m3fn).float()
    counts = records[..., rows * row_bytes : rows * (row_bytes + 1)].float()
    sizes = torch.where(counts > 0, counts.log(), EMPTY)
    shape = (*records.shape[:-1], *shape)
    centres = means.view(*shape, row_bytes)[..., : layout.head_dim]
    return torch.cat((centres, sizes.view(*shape, 1)), dim=-1)
