"""Shadow steps: beside a sampled layer's sparse attention runs the dense one, and tells what the
choice of tiles was worth."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from bicl.attention.backend import AttentionBackend
from bicl.attention.metadata import AttentionMetadata
from bicl.attention.pool import LayerCache
from bicl.attention.rotary import Rotary
from bicl.sparse.backend import SparseBackend
from bicl.sparse.config import HySparseConfig
from bicl.sparse.gate_file import open_gate
from bicl.sparse.index import make_indexes

__all__ = ["LayerProbe", "ShadowBackend", "make_shadow_backend"]

AUDITED_PAGES = 256
"""Index rows that an audit computes again, spread over the sparse layers and the rows of a step."""


@dataclass(frozen=True)
class LayerProbe:
    """What one layer's attention looked like in a shadow step; float32 ``[B]`` each.

    Attributes:
        entropy: order-2 entropy of the dense attention in nats, mean of the heads: its
            exponential is the number of keys that share the attention. From two log-sum-exps,
            ``2 LSE(s) - LSE(2 s)``, so that no probabilities are kept.
        mass_kept: ``exp(LSE of the tiles read - LSE of all)``, mean of the heads; ``None`` in a
            layer that is not sparse.
        tiles_read: that each KV head read; ``None`` likewise.
    """

    entropy: torch.Tensor
    mass_kept: torch.Tensor | None = None
    tiles_read: torch.Tensor | None = None


class ShadowBackend:
    """``AttentionBackend`` around a :class:`SparseBackend`; unless armed it only passes on.

    Args:
        sparse: what serves.
        layers: pages of every layer, by layer number.
    """

    def __init__(self, sparse: SparseBackend, layers: Mapping[int, LayerCache]) -> None:
        self.name = sparse.name
        self.sparse = sparse
        self._numbers = {layer.pages.data_ptr(): number for number, layer in layers.items()}
        self._armed: frozenset[int] = frozenset()
        self._probes: dict[int, LayerProbe] = {}

    def arm(self, layers: Iterable[int]) -> None:
        """Probe these layers' decode rows in the next step, which must not come from a CUDA
        graph."""
        self._armed = frozenset(layers)
        self._probes = {}

    def disarm(self) -> dict[int, LayerProbe]:
        """What the step told, by layer number."""
        self._armed = frozenset()
        probes, self._probes = self._probes, {}
        return probes

    def reindex(self, pages: torch.Tensor, layer: int) -> torch.Tensor:
        """Compute the index rows of full pages again.

        Args:
            pages: int64 ``[n]``, on the pool's device.
            layer: number of a sparse layer.

        Returns:
            bool ``[n]``: which rows had been wrong.
        """
        vectors = self.sparse.indexes[layer].vectors
        before = vectors.index_select(0, pages)
        self.sparse.index_pages(layer, pages)
        return (before != vectors.index_select(0, pages)).flatten(1).any(dim=1)

    def audit(self, tables: Sequence[Sequence[int]], draw: random.Random) -> list[int]:
        """Look whether index rows describe their pages: in every sparse layer some of each table,
        others in each. A table with wrong ones is indexed again whole, for those who share it.

        Args:
            tables: full pages, a list for each sequence.

        Returns:
            How many of each table's were wrong, over all layers.
        """
        layers = list(self.sparse.indexes)
        share = max(1, AUDITED_PAGES // max(1, len(tables) * len(layers)))
        sample = [
            (row, page)
            for _ in layers
            for row, table in enumerate(tables)
            for page in draw.sample(table, min(share, len(table)))
        ]
        if not sample:
            return [0] * len(tables)
        device = self.sparse.indexes[layers[0]].vectors.device
        pages = torch.tensor([page for _, page in sample], device=device)
        parts = pages.view(len(layers), -1).unbind()
        wrong = torch.stack([self.reindex(*own) for own in zip(parts, layers, strict=True)])
        counts = [0] * len(tables)
        for (row, _), bad in zip(sample, wrong.flatten().tolist(), strict=True):
            counts[row] += bad
        again = {page for row, count in enumerate(counts) if count for page in tables[row]}
        if again:
            everything = torch.tensor(sorted(again), device=device)
            for layer in layers:
                self.reindex(everything, layer)
        return counts

    # --- AttentionBackend --------------------------------------------------------------------
    def plan(self, meta: AttentionMetadata) -> None:
        self.sparse.plan(meta)

    def store(
        self,
        layer: LayerCache,
        key: torch.Tensor,
        value: torch.Tensor,
        slots: torch.Tensor,
        *,
        rotary: Rotary | None = None,
    ) -> None:
        self.sparse.store(layer, key, value, slots, rotary=rotary)

    def run(
        self,
        query: torch.Tensor,
        layer: LayerCache,
        meta: AttentionMetadata,
        *,
        scale: float,
        window_left: int = -1,
        window_right: int = -1,
        softcap: float = 0.0,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        number = self._numbers.get(layer.pages.data_ptr()) if self._armed else None
        result = self.sparse.run(
            query,
            layer,
            meta,
            scale=scale,
            window_left=window_left,
            window_right=window_right,
            softcap=softcap,
            out=out,
            return_lse=return_lse,
        )
        if number in self._armed and (meta.max_q == 1 or meta.num_decodes):
            assert number is not None
            meta = self.sparse.decode_part(meta)
            query = query[: meta.batch_size]
            self._probes[number] = self._probe(
                number, query, layer, meta, scale, window_left, softcap
            )
        return result

    def gather(
        self, layer: LayerCache, page_table: torch.Tensor, cache_seqlens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.sparse.gather(layer, page_table, cache_seqlens)

    def copy_pages(
        self, layers: list[LayerCache], source: torch.Tensor, target: torch.Tensor
    ) -> None:
        self.sparse.copy_pages(layers, source, target)

    def _probe(
        self,
        number: int,
        query: torch.Tensor,
        layer: LayerCache,
        meta: AttentionMetadata,
        scale: float,
        window_left: int,
        softcap: float,
    ) -> LayerProbe:
        def lse(step: AttentionMetadata, sharpness: float) -> torch.Tensor:
            # Scaling before and after the cap alike makes every score `sharpness` times itself.
            _, values = self.sparse.inner.run(
                query,
                layer,
                step,
                scale=sharpness * scale,
                window_left=window_left,
                softcap=sharpness * softcap,
                return_lse=True,
            )
            return values

        dense = replace(meta, sparsity=None)
        whole = lse(dense, 1.0)
        entropy = (2.0 * whole - lse(dense, 2.0)).mean(dim=0)
        index = self.sparse.indexes.get(number)
        if index is None or not self.sparse.selects(meta, window_left):
            return LayerProbe(entropy)
        chosen = self.sparse.select(query, index, meta, scale)
        kept = torch.exp(lse(chosen, 1.0) - whole).mean(dim=0)
        size = layer.layout.page_size
        return LayerProbe(entropy, kept, (chosen.cache_seqlens + size - 1) // size)


def make_shadow_backend(
    inner: AttentionBackend,
    config: HySparseConfig,
    layers: Sequence[LayerCache],
    sparse: Sequence[int],
    dtype: torch.dtype,
) -> ShadowBackend:
    """HySparse around a backend, with empty indexes.

    Args:
        inner: runs attention.
        config: of the server.
        layers: pages of every layer.
        sparse: numbers of the sparse ones.
        dtype: the model's.

    Raises:
        ConfigError: the gate's file cannot be used for these layers.
    """
    own = {number: layers[number] for number in sparse}
    indexes = make_indexes(own, config.variant, dtype, open_gate(config.gate_path))
    return ShadowBackend(SparseBackend(inner, config, indexes), dict(enumerate(layers)))
