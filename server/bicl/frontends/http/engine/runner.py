"""One packed forward step: chunks of sequences in, logits out."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import torch

from bicl.attention.backend import AttentionBackend, make_backend
from bicl.attention.metadata import AttentionMetadata
from bicl.attention.pool import KVPool
from bicl.cache.sequence import PageCopy
from bicl.frontends.http.engine.config import EngineConfig
from bicl.frontends.http.engine.graphs import DecodeGraphs
from bicl.frontends.http.engine.scheduler import Chunk
from bicl.frontends.http.engine.sequence import LogitsNeed, Sequence
from bicl.frontends.http.engine.sizing import page_layouts, sparse_layers
from bicl.frontends.http.loader import LoadedModel
from bicl.frontends.transformers import PackedCache
from bicl.frontends.transformers.packed import PackedModel
from bicl.sparse.backend import SparseBackend
from bicl.sparse.index import make_indexes
from bicl.sparse.shadow import ShadowBackend

__all__ = ["ModelRunner"]


class ModelRunner:
    """Owns the pool and everything a forward step needs on the device.

    Page tables of the running sequences are kept on the host, one row each, and only grow; a step
    gathers its rows from there.

    Args:
        loaded: the model.
        config: limits.
        num_pages: pages of the pool.
    """

    def __init__(self, loaded: LoadedModel, config: EngineConfig, num_pages: int) -> None:
        self.device = loaded.device
        self.backend: AttentionBackend = make_backend(self.device)
        self.page_size = config.page_size
        self.pool = KVPool(page_layouts(loaded, config), num_pages, self.device)
        self.shadow: ShadowBackend | None = None
        if config.hysparse is not None:
            self.backend = self.shadow = _sparse(self.backend, self.pool, loaded, config)
        self._model = PackedModel(loaded.model, PackedCache(self.pool, self.backend))
        max_pages = -(-config.max_total_tokens // config.page_size)
        self._table = np.zeros((config.max_batch_size, max_pages), dtype=np.int32)
        self._filled = np.zeros(config.max_batch_size, dtype=np.int64)
        self.graphs: DecodeGraphs | None = None
        if self.device.type == "cuda" and config.cuda_graphs:
            self.graphs = DecodeGraphs(self._model, self.backend, config, self.device)

    def admit(self, sequence: Sequence) -> None:
        """A sequence took over row ``sequence.row`` of the page table."""
        self._filled[sequence.row] = 0

    def copy_pages(self, copies: SequenceOf[PageCopy]) -> None:
        """Copy pages in every layer, before the step that reads them."""
        source, target = (
            torch.tensor([getattr(copy, name) for copy in copies], device=self.device)
            for name in ("source", "target")
        )
        self.backend.copy_pages(self.pool.layers, source, target)

    def forward(
        self,
        chunks: SequenceOf[Chunk],
        sparsity: np.ndarray | None = None,
        *,
        watched: bool = False,
    ) -> torch.Tensor:
        """Compute the chunks and return logits, float32 ``[n, vocab_size]``: for each chunk in
        order none, its last token's or all its tokens', as it asked.

        Args:
            chunks: of the step.
            sparsity: float32, one a chunk; ``None``: all dense.
            watched: layers are probed, which no CUDA graph can do.
        """
        step = self._pack(chunks)
        if self.graphs is not None and step.is_decode and not watched:
            logits = self.graphs.replay(
                step.input_ids,
                step.positions,
                step.page_table,
                step.cache_seqlens,
                step.slots,
                sparsity,
            )
            if logits is not None:
                return logits
        meta = AttentionMetadata(
            page_table=self._to_device(step.page_table),
            cache_seqlens=self._to_device(step.cache_seqlens),
            cu_seqlens_q=self._to_device(step.cu_seqlens_q),
            slot_mapping=self._to_device(step.slots),
            max_q=int(step.counts.max()),
            max_k=int(step.cache_seqlens.max()),
            sparsity=None if sparsity is None else self._to_device(sparsity),
        )
        return self._model(
            self._to_device(step.input_ids),
            self._to_device(step.positions),
            meta,
            self._to_device(step.logit_rows),
        )

    def _pack(self, chunks: SequenceOf[Chunk]) -> _Packed:
        ids: list[int] = []
        logit_rows: list[int] = []
        for chunk in chunks:
            sequence, start, end = chunk.sequence, chunk.start, chunk.start + chunk.count
            self._extend_row(sequence)
            if chunk.logits is LogitsNeed.ALL:
                logit_rows.extend(range(len(ids), len(ids) + chunk.count))
            elif chunk.logits is LogitsNeed.LAST:
                logit_rows.append(len(ids) + chunk.count - 1)
            if chunk.count == 1:
                ids.append(sequence.ids[start])
            else:
                ids.extend(sequence.ids[start:end])
        counts = np.array([chunk.count for chunk in chunks], dtype=np.int32)
        starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
        return _Packed(
            ids=ids,
            logit_rows=logit_rows,
            counts=counts,
            starts=starts,
            page_table=self._table[[chunk.sequence.row for chunk in chunks]],
            page_size=self.page_size,
        )

    def _extend_row(self, sequence: Sequence) -> None:
        assert sequence.pages is not None
        pages, row = sequence.pages.page_ids, sequence.row
        filled = self._filled[row]
        if filled != len(pages):
            self._table[row, filled : len(pages)] = pages[filled:]
            self._filled[row] = len(pages)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)


def _sparse(
    inner: AttentionBackend, pool: KVPool, loaded: LoadedModel, config: EngineConfig
) -> ShadowBackend:
    assert config.hysparse is not None
    layers = {number: pool.layers[number] for number in sparse_layers(loaded, config)}
    indexes = make_indexes(layers, config.hysparse.variant, loaded.dtype)
    backend = SparseBackend(inner, config.hysparse, indexes)
    return ShadowBackend(backend, dict(enumerate(pool.layers)))


class _Packed:
    """A step's arrays, on the host."""

    def __init__(
        self,
        *,
        ids: list[int],
        logit_rows: list[int],
        counts: np.ndarray,
        starts: np.ndarray,
        page_table: np.ndarray,
        page_size: int,
    ) -> None:
        self.counts = counts
        self.input_ids = np.array(ids, dtype=np.int64)
        self.logit_rows = np.array(logit_rows, dtype=np.int64)
        self.cu_seqlens_q = np.zeros(len(counts) + 1, dtype=np.int32)
        np.cumsum(counts, out=self.cu_seqlens_q[1:])
        self.is_decode = len(ids) == len(counts) == len(logit_rows)
        if self.is_decode:
            row_of: np.ndarray = np.arange(len(counts))
            self.positions = starts
        else:
            row_of = np.repeat(np.arange(len(counts)), counts)
            first = self.cu_seqlens_q[:-1].astype(np.int64)
            self.positions = np.arange(len(ids)) + (starts - first)[row_of]
        self.page_table = page_table
        self.cache_seqlens = (starts + counts).astype(np.int32)
        pages = page_table[row_of, self.positions // page_size].astype(np.int64)
        self.slots = pages * page_size + self.positions % page_size
