"""Select mode as a backend around a backend: score, select, then the dense decode kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch

from bicl.attention.backend import AttentionBackend
from bicl.attention.metadata import AttentionMetadata
from bicl.attention.pool import LayerCache
from bicl.attention.rotary import Rotary
from bicl.errors import BackendError
from bicl.ops.cpu.sparse import select_tiles
from bicl.sparse.config import HySparseConfig
from bicl.sparse.index import LayerIndex
from bicl.sparse.mixed import MixedStep, divide
from bicl.sparse.selection import SelectionRule

__all__ = ["SparseBackend"]

_OPERATORS = {"cpu": "bicl.ops.cpu.sparse", "cuda": "bicl.ops.cuda.sparse"}


class SparseBackend:
    """``AttentionBackend`` whose decode steps read a choice of pages in the indexed layers.

    A layer without an index, a sequence with more than one query, a layer's window, and a step
    without ``meta.sparsity`` run on ``inner`` unchanged.

    Args:
        inner: stores, gathers, attends.
        config: variant, combine and the limits of the selection; ratios come with each step.
        indexes: the sparse layers' indexes, by layer number.
    """

    def __init__(
        self, inner: AttentionBackend, config: HySparseConfig, indexes: Mapping[int, LayerIndex]
    ) -> None:
        if inner.name not in _OPERATORS:
            raise BackendError(
                f"HySparse has no operators for backend {inner.name!r}; it runs on "
                f"{', '.join(_OPERATORS)}; start without --enable-hysparse"
            )
        self.name = inner.name
        self.inner = inner
        self.config = config
        self.indexes = dict(indexes)
        self._ops: Any = import_module(_OPERATORS[inner.name])
        for index in indexes.values():
            self._ops.check_index(index)
        self._by_pages = {index.layer.pages.data_ptr(): index for index in indexes.values()}
        sizes = {index.layer.layout.page_size for index in indexes.values()}
        # The CUDA backend, where it may overlap kernels. Elsewhere a step's rows may be drafts of
        # one sequence, which complete pages together.
        self._overlapping: Any = inner if getattr(inner, "pdl", False) else None
        self._deterministic = bool(getattr(inner, "deterministic", False))
        self._decodes = self._chooses = False
        self._mixed: tuple[AttentionMetadata, MixedStep] | None = None
        # Of the planned step: what the numbers of tokens that are read depend on, and these numbers
        # by share, page size and whether a graph records them, as the first layer found them.
        self._counted: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self._lengths: dict[tuple[float, int, bool], torch.Tensor] = {}
        self._stored: tuple[torch.Tensor, torch.Tensor] | None = None  # pages and slots, last call
        self.rules = {size: SelectionRule.of(config, size) for size in sizes}

    def plan(self, meta: AttentionMetadata) -> None:
        """See ``AttentionBackend.plan``."""
        self._decodes = meta.max_q == 1
        self._chooses = self._decodes and self.selects(meta) and meta.keep is None
        self._counted = (meta.cache_seqlens, meta.sparsity)
        self._lengths.clear()
        self.inner.plan(meta)

    def store(
        self,
        layer: LayerCache,
        key: torch.Tensor,
        value: torch.Tensor,
        slots: torch.Tensor,
        *,
        rotary: Rotary | None = None,
    ) -> None:
        """See ``AttentionBackend.store``; pages that this fills enter the index."""
        index = self._by_pages.get(layer.pages.data_ptr())
        if index is not None and self._decodes and self._overlapping is not None:
            extra = {"records": index.vectors, "choice_follows": self._chooses}
            self._overlapping.store(layer, key, value, slots, rotary=rotary, **extra)
        else:
            self.inner.store(layer, key, value, slots, rotary=rotary)
            if index is not None:
                self._ops.index_pages(layer, index, slots)
        self._stored = (layer.pages, slots)

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
        """See ``AttentionBackend.run``. The LSE is of the keys that were read."""
        index = self._by_pages.get(layer.pages.data_ptr())
        run = self.inner.run
        if index is not None and self.selects(meta, window_left):
            if meta.max_q > 1:
                options = {"scale": scale, "softcap": softcap, "return_lse": return_lse}
                return self._run_mixed(query, layer, meta, out, options)
            meta, known = self._choose(query, index, meta, scale)
            if known:
                run = partial(self._overlapping.run, lengths_known=True)
        return run(
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

    def selects(self, meta: AttentionMetadata, window_left: int = -1) -> bool:
        """Whether rows of this step read a choice of pages in the sparse layers."""
        decodes = meta.max_q == 1 or meta.num_decodes > 0
        return meta.sparsity is not None and decodes and window_left < 0

    def decode_part(self, meta: AttentionMetadata) -> AttentionMetadata:
        """The rows of a step that may leave pages out."""
        return meta if meta.max_q == 1 else self._divided(meta).decodes

    def _divided(self, meta: AttentionMetadata) -> MixedStep:
        """Taken apart once a step, so that backends know the parts again."""
        if self._mixed is None or self._mixed[0] is not meta:
            self._mixed = (meta, divide(meta))
        return self._mixed[1]

    def _run_mixed(
        self,
        query: torch.Tensor,
        layer: LayerCache,
        meta: AttentionMetadata,
        out: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Decode rows read a choice of pages, the others all of theirs."""
        step = self._divided(meta)
        n = step.num_decodes
        if out is None:
            out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        parts = [
            self.run(query[:n], layer, step.decodes, out=out[:n], **options),
            self.inner.run(query[n:], layer, step.rest, out=out[n:], **options),
        ]
        if not options["return_lse"]:
            return out
        return out, torch.cat([lse for _, lse in parts], dim=1)

    def select(
        self, query: torch.Tensor, index: LayerIndex, meta: AttentionMetadata, scale: float
    ) -> AttentionMetadata:
        """The step as one layer sees it: each KV head's pages and how many tokens they hold."""
        return self._choose(query, index, meta, scale)[0]

    def _choose(
        self, query: torch.Tensor, index: LayerIndex, meta: AttentionMetadata, scale: float
    ) -> tuple[AttentionMetadata, bool]:
        """See :meth:`select`; and whether an earlier layer wrote those lengths."""
        if meta.keep is not None:
            return self._select_with(meta.keep, query, index, meta, scale), False
        pages, lengths = self._ops.choose_tiles(
            query,
            index.layer,
            index,
            meta.page_table,
            meta.cache_seqlens,
            meta.sparsity,
            self.rules[index.layer.layout.page_size],
            self.config.combine,
            scale=scale,
            after_store=self._follows_store(index.layer, meta),
            deterministic=self._deterministic,
        )
        known = self._known_lengths(index, meta, lengths)
        chosen = replace(meta, page_table=pages, cache_seqlens=known, sparsity=None)
        return chosen, known is not lengths

    def _known_lengths(
        self, index: LayerIndex, meta: AttentionMetadata, lengths: torch.Tensor
    ) -> torch.Tensor:
        """``lengths``, or what an earlier layer of this step found, which are the same numbers but
        need not be waited for."""
        planned = self._counted if self._overlapping is not None else None
        if (
            planned is None
            or planned[0] is not meta.cache_seqlens
            or planned[1] is not meta.sparsity
        ):
            return lengths
        size, capturing = index.layer.layout.page_size, torch.cuda.is_current_stream_capturing()
        return self._lengths.setdefault((index.share, size, capturing), lengths)

    def _select_with(
        self,
        keep: torch.Tensor,
        query: torch.Tensor,
        index: LayerIndex,
        meta: AttentionMetadata,
        scale: float,
    ) -> AttentionMetadata:
        """With further pages that are always read: scored as ever, chosen in plain torch."""
        layer, rule = index.layer, self.rules[index.layer.layout.page_size]
        place = (meta.page_table, meta.cache_seqlens)
        assert meta.sparsity is not None
        scores = self._ops.score_tiles(query, layer, index, *place, scale)
        pages, lengths = select_tiles(
            scores,
            *place,
            meta.sparsity * index.share,
            rule,
            layer.layout.num_kv_heads,
            self.config.combine,
            keep=keep[:, None],
        )
        return replace(meta, page_table=pages, cache_seqlens=lengths, sparsity=None, keep=None)

    def _follows_store(self, layer: LayerCache, meta: AttentionMetadata) -> bool:
        """Whether the last call stored this step's new tokens in this layer, one a sequence."""
        stored = self._stored if self._overlapping is not None else None
        return stored is not None and stored[0] is layer.pages and stored[1] is meta.slot_mapping

    def index_pages(self, number: int, pages: torch.Tensor) -> None:
        """Compute layer ``number``'s index rows of full pages (int64 ``[n]``) again."""
        self._stored = None
        index = self.indexes[number]
        size = index.layer.layout.page_size
        self._ops.index_pages(index.layer, index, pages * size + size - 1)

    def gather(
        self, layer: LayerCache, page_table: torch.Tensor, cache_seqlens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``AttentionBackend.gather``."""
        return self.inner.gather(layer, page_table, cache_seqlens)

    def copy_pages(
        self, layers: list[LayerCache], source: torch.Tensor, target: torch.Tensor
    ) -> None:
        """See ``AttentionBackend.copy_pages``; index rows go with their pages."""
        self._stored = None
        self.inner.copy_pages(layers, source, target)
        for layer in layers:
            index = self._by_pages.get(layer.pages.data_ptr())
            if index is not None:
                index.vectors.index_copy_(0, target, index.vectors.index_select(0, source))
