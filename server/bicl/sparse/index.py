"""What is kept of every page of a sparse layer, so that a query can judge it unread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch.nn import functional as F

from bicl.attention.pool import LayerCache
from bicl.cache.layout import PageLayout
from bicl.ops.cpu.sparse import (
    EMPTY,
    cluster_means,
    quantise_rows,
    quantise_spreads,
    stored_rows,
    turned,
)
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

RECORDS = 2
"""Version of what a record's bytes mean; 1 had centroids that were not turned."""


@dataclass(frozen=True)
class LayerIndex:
    """One sparse layer's index.

    Attributes:
        layer: the pages it describes.
        vectors: a record a page; those of pages that are not full hold anything. ``centroids``:
            uint8 ``[num_pages, n]``, for each head and centroid ``[H, C]``: the dims of the mean of
            a cluster of the page's keys, turned (:func:`bicl.ops.cpu.sparse.turned`), as 4-bit
            steps (rows of D32 / 2 bytes, D32: D rounded up to 32; of each word's bytes the low
            nibbles are four dims, the high ones the next four);
            then float16 ``[H, C, 2]``, step and least value; then ``[H, C, 2]`` bytes, the keys in
            it (uint8) and their spread (float8_e5m2); then nothing up to a multiple of 16.
            ``bounds``: ``[num_pages, H, 2, D]``, minimum and maximum of each dim over the keys.
            ``gate``: ``[num_pages, H, 1, R]``, the mean of their gated directions. The latter two
            are of the model's dtype.
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

    @property
    def meaning(self) -> str:
        """Of the records' bytes: tiers that outlive the process keep pages of each apart."""
        return f"{self.kind} {RECORDS}"

    def describe(self, keys: torch.Tensor) -> torch.Tensor:
        """Records of full pages of keys, float32 ``[n, H, page_size, D]``."""
        if self.kind == "centroids":
            rows = cluster_means(keys, keys.shape[2] // CENTROID_TOKENS)
            stored = quantise_rows(turned(rows[..., :-2]))
            return _pack_centroids(*stored, rows[..., -2], rows[..., -1])
        if self.kind in PAGE_GATES:
            return PAGE_GATES[self.kind].describe(keys).to(self.dtype)
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
        return (_up_to(16, prod(_centroids(layout)) * (_row_bytes(layout.head_dim) + 6)),)
    rows_and_dims = (2, layout.head_dim) if kind == "bounds" else (1, GATE_DIM)
    return (layout.num_kv_heads, *rows_and_dims)


def _centroids(layout: PageLayout) -> tuple[int, int]:
    """Of one page: heads, and those of each."""
    return layout.num_kv_heads, layout.page_size // CENTROID_TOKENS


def _row_bytes(head_dim: int) -> int:
    return _up_to(32, head_dim) // 2


def _up_to(multiple: int, size: int) -> int:
    return -(-size // multiple) * multiple


def _pack_centroids(
    steps: torch.Tensor, affine: torch.Tensor, log_sizes: torch.Tensor, spreads: torch.Tensor
) -> torch.Tensor:
    """Records of uint8 ``[n, H, C, D]``, float16 ``[n, H, C, 2]`` and float32 ``[n, H, C]``."""
    padded = F.pad(steps, (0, -steps.shape[-1] % 32))
    words = padded.view(*padded.shape[:-1], -1, 2, 4)
    rows = words[..., 0, :] | words[..., 1, :] << 4
    sizes = log_sizes.exp().round().byte()
    facts = torch.stack((sizes, quantise_spreads(spreads).view(torch.uint8)), dim=-1)
    packed = torch.cat((rows.flatten(1), affine.flatten(1).view(torch.uint8), facts.flatten(1)), 1)
    return F.pad(packed, (0, -packed.shape[1] % 16))


def unpack_centroids(records: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    """``centroid_rows``, float32 ``[..., H, C, D + 2]``, of records uint8 ``[..., n]``."""
    count, row_bytes = prod(_centroids(layout)), _row_bytes(layout.head_dim)
    shape = (*records.shape[:-1], *_centroids(layout))
    parts = [count * row_bytes, count * 4, count * 2]
    rows, affine, facts = torch.split(records[..., : sum(parts)], parts, dim=-1)
    words = rows.reshape(*shape, -1, 4)
    steps = torch.stack((words & 15, words >> 4), dim=-2).flatten(-3)[..., : layout.head_dim]
    ranges = affine.contiguous().view(torch.float16).reshape(*shape, 2)
    sizes, spreads = facts.reshape(*shape, 2).unbind(dim=-1)
    logs = torch.where(sizes > 0, sizes.float().log(), EMPTY)
    return stored_rows(steps, ranges, logs, spreads.contiguous().view(torch.float8_e5m2))
