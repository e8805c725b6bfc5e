"""One packed forward step: chunks of sequences in, logits out."""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np
import torch

from bicl.attention.backend import AttentionBackend, make_backend
from bicl.attention.metadata import AttentionMetadata
from bicl.attention.pool import KVPool
from bicl.attention.store_clock import StoreClock
from bicl.cache.keys import ID_BYTES
from bicl.cache.sequence import PageCopy, SequencePages
from bicl.cache.tiers import Fetch
from bicl.frontends.http.engine.config import EngineConfig
from bicl.frontends.http.engine.graphs import DecodeGraphs
from bicl.frontends.http.engine.plan import Chunk
from bicl.frontends.http.engine.sequence import LogitsNeed, Sequence
from bicl.frontends.http.engine.sizing import (
    group_pages,
    page_layouts,
    sparse_layers,
)
from bicl.frontends.http.loader import LoadedModel
from bicl.frontends.transformers import PackedCache
from bicl.frontends.transformers.packed import PackedModel
from bicl.sparse.compact import CompactBackend
from bicl.sparse.selection import SelectionRule
from bicl.sparse.shadow import ShadowBackend, make_shadow_backend

__all__ = ["ModelRunner"]

INLINE_BYTES = 1 << 16
"""Up to so many the driver takes along with the command to copy them; page-locking them first takes
longer than that."""


class ModelRunner:
    """Owns the pool and everything a forward step needs on the device.

    Page tables of the running sequences are kept on the host, one row each, and only grow; a step
    gathers its rows from there.

    Args:
        loaded: the model.
        config: limits.
        num_pages: pages of the pool.

    Attributes:
        clock: times what the steps' stores hold up.
    """

    def __init__(self, loaded: LoadedModel, config: EngineConfig, num_pages: int) -> None:
        self.device = loaded.device
        self.backend: AttentionBackend = make_backend(self.device)
        self._kernels = [self.backend]
        self.page_size = config.page_size
        group = group_pages(loaded, config, num_pages)
        layouts = page_layouts(loaded, config)
        self.pool = KVPool(layouts, num_pages, self.device, group_pages=group)
        self.shadow: ShadowBackend | None = None
        self.compact: CompactBackend | None = None
        if config.compact:
            assert config.hysparse is not None
            full, kept = self.backend, make_backend(self.device)
            self._kernels.append(kept)
            self.backend = self.compact = CompactBackend(
                full,
                kept,
                {number: self.pool.layers[number] for number in group},
                SelectionRule.of(config.hysparse, config.page_size),
            )
        elif config.hysparse is not None:
            self.backend = self.shadow = make_shadow_backend(
                self.backend,
                config.hysparse,
                self.pool.layers,
                sparse_layers(loaded, config),
                loaded.dtype,
            )
        self.clock = StoreClock(self.device, len(self.pool.layers))
        self._cache = PackedCache(self.pool, self.backend)
        self._cache.clock = self.clock
        self._model = PackedModel(loaded.model, self._cache)
        max_pages = -(-config.max_total_tokens // config.page_size)
        self._table = np.zeros((config.max_batch_size, max_pages), dtype=np.int32)
        self._filled = np.zeros(config.max_batch_size, dtype=np.int64)
        # The second page group's table; a row belongs to the pages that it was filled from.
        self._group_table = np.zeros_like(self._table)
        self._group_filled = np.zeros_like(self._filled)
        self._group_pages: list[SequencePages | None] = [None] * config.max_batch_size
        self.graphs: DecodeGraphs | None = None
        if self.device.type == "cuda" and config.cuda_graphs:
            self.graphs = DecodeGraphs(
                self._model, self.backend, config, self.pool, loaded.dtype, self.clock
            )

    @property
    def unwidened_prefills(self) -> int:
        """See ``EngineStats``."""
        return sum(getattr(backend, "unwidened_prefills", 0) for backend in self._kernels)

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

    def page_tensors(self) -> list[list[torch.Tensor]]:
        """Each layer's tensors of which a page owns a part: its pages, and their index if any."""
        tensors = [[layer.pages] for layer in self.pool.layers]
        if self.shadow is not None:
            for number, index in self.shadow.sparse.indexes.items():
                tensors[number].append(index.vectors)
        return tensors

    @property
    def cache_bytes(self) -> int:
        """Memory of :meth:`page_tensors`."""
        return sum(tensor.nbytes for tensors in self.page_tensors() for tensor in tensors)

    def time_prefill(self, num_tokens: int) -> float:
        """Seconds that one chunk takes. Writes to the first pages, which nobody may be using."""
        pages = np.arange(-(-num_tokens // self.page_size), dtype=np.int32)
        positions = np.arange(num_tokens)
        meta = AttentionMetadata(
            page_table=self._to_device(pages[None]),
            cache_seqlens=self._to_device(np.array([num_tokens], dtype=np.int32)),
            cu_seqlens_q=self._to_device(np.array([0, num_tokens], dtype=np.int32)),
            slot_mapping=self._to_device(positions),
            max_q=num_tokens,
            max_k=num_tokens,
        )
        if self.compact is not None:
            meta = replace(meta, compact=meta)
        ids, last = np.zeros(num_tokens, dtype=np.int64), np.array([num_tokens - 1])
        seconds = []
        for _ in range(2):  # the first call also allocates
            began = time.perf_counter()
            logits = self._model(
                self._to_device(ids), self._to_device(positions), meta, self._to_device(last)
            )
            logits.argmax().item()  # waits for the device
            seconds.append(time.perf_counter() - began)
        return min(seconds)

    def forward(
        self,
        chunks: SequenceOf[Chunk],
        sparsity: np.ndarray | None = None,
        *,
        keep: np.ndarray | None = None,
        watched: bool = False,
        fetches: SequenceOf[Fetch] = (),
    ) -> torch.Tensor:
        """Compute the chunks and return logits, float32 ``[n, vocab_size]``: for each chunk in
        order none, its last token's or all its tokens', as it asked.

        Args:
            chunks: of the step.
            sparsity: float32, one a chunk; ``None``: all dense.
            keep: bool, a row a chunk: pages that are always read. Such steps take no CUDA graph.
            watched: layers are probed, which no CUDA graph can do.
            fetches: pages that the chunks read and that may still be on their way.

        Raises:
            TransferError: pages did not come. Nothing that was written counts.
        """
        step = self._pack(chunks)
        if self.graphs is not None and step.is_decode and not watched and keep is None:
            for fetch in fetches:
                fetch.join_all(len(self.pool.layers))
            logits = self.graphs.replay(
                step.input_ids,
                step.positions,
                step.page_table,
                step.cache_seqlens,
                step.slots,
                sparsity,
                step.group,
            )
            if logits is not None:
                return logits
        self._cache.arrivals = fetches
        meta = AttentionMetadata(
            page_table=self._to_device(step.page_table),
            cache_seqlens=self._to_device(step.cache_seqlens),
            cu_seqlens_q=self._to_device(step.cu_seqlens_q),
            slot_mapping=self._to_device(step.slots),
            max_q=int(step.counts.max()),
            max_k=int(step.cache_seqlens.max()),
            sparsity=None if sparsity is None else self._to_device(sparsity),
            num_decodes=_num_decodes(chunks),
            keep=None if keep is None else self._to_device(self._as_wide(keep)),
        )
        if step.group is not None:
            meta = replace(
                meta,
                compact=replace(
                    meta,
                    page_table=self._to_device(step.group.page_table),
                    cache_seqlens=self._to_device(step.group.cache_seqlens),
                    slot_mapping=self._to_device(step.group.slots),
                    max_k=int(step.group.cache_seqlens.max()),
                ),
            )
        return self._model(
            self._to_device(step.input_ids),
            self._to_device(step.positions),
            meta,
            self._to_device(step.logit_rows),
        )

    def _pack(self, chunks: SequenceOf[Chunk]) -> _Packed:
        logit_rows: list[int] = []
        first = 0
        for chunk in chunks:
            self._extend_row(chunk.sequence)
            first += chunk.count
            if chunk.logits is LogitsNeed.ALL:
                logit_rows.extend(range(first - chunk.count, first))
            elif chunk.logits is LogitsNeed.LAST:
                logit_rows.append(first - 1)
        counts = np.array([chunk.count for chunk in chunks], dtype=np.int32)
        starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
        return _Packed(
            input_ids=_input_ids(chunks),
            logit_rows=logit_rows,
            counts=counts,
            starts=starts,
            page_table=self._table[[chunk.sequence.row for chunk in chunks]],
            page_size=self.page_size,
            committed=_committed(chunks),
            group=None if self.compact is None else self._pack_group(chunks),
        )

    def _pack_group(self, chunks: SequenceOf[Chunk]) -> tuple[np.ndarray, np.ndarray]:
        """The second group's table rows, and how many tokens each row dropped there."""
        rows, dropped = [], []
        for chunk in chunks:
            sequence = chunk.sequence
            assert sequence.pages is not None
            group, row = sequence.pages.group, sequence.row
            assert group is not None
            if self._group_pages[row] is not group.pages:
                self._group_pages[row], self._group_filled[row] = group.pages, 0
            pages, filled = group.pages.page_ids, self._group_filled[row]
            if filled != len(pages):
                self._group_table[row, filled : len(pages)] = pages[filled:]
                self._group_filled[row] = len(pages)
            rows.append(row)
            dropped.append(group.num_dropped_tokens)
        return self._group_table[rows], np.array(dropped, dtype=np.int64)

    def _extend_row(self, sequence: Sequence) -> None:
        assert sequence.pages is not None
        pages, row = sequence.pages.page_ids, sequence.row
        filled = self._filled[row]
        if filled != len(pages):
            self._table[row, filled : len(pages)] = pages[filled:]
            self._filled[row] = len(pages)

    def _as_wide(self, keep: np.ndarray) -> np.ndarray:
        wide = np.zeros((len(keep), self._table.shape[1]), dtype=bool)
        wide[:, : keep.shape[1]] = keep
        return wide

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if tensor.nbytes > INLINE_BYTES and self.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)


def _input_ids(chunks: SequenceOf[Chunk]) -> np.ndarray:
    """int64. Decode rows come first; prompts are packed already."""
    decodes = _num_decodes(chunks)
    newest = np.array([c.sequence.ids[c.start] for c in chunks[:decodes]], dtype=np.int64)
    return np.concatenate([newest, *map(_ids_of, chunks[decodes:])])


def _ids_of(chunk: Chunk) -> np.ndarray:
    sequence, end = chunk.sequence, chunk.start + chunk.count
    if end <= sequence.num_prompt:
        return np.frombuffer(sequence.packed_prompt, np.int64, chunk.count, chunk.start * ID_BYTES)
    return np.array(sequence.ids[chunk.start : end], dtype=np.int64)


def _num_decodes(chunks: SequenceOf[Chunk]) -> int:
    """Leading chunks of one token."""
    return sum(1 for _ in takewhile(lambda chunk: chunk.count == 1, chunks))


def _committed(chunks: SequenceOf[Chunk]) -> np.ndarray:
    """Leading tokens of each sequence that others may read already: never written again."""
    pages = [chunk.sequence.pages for chunk in chunks]
    return np.array([0 if p is None else p.num_committed_tokens for p in pages], dtype=np.int64)


@dataclass(frozen=True)
class _Group:
    """The step as the second page group sees it."""

    page_table: np.ndarray
    cache_seqlens: np.ndarray
    slots: np.ndarray

    def arrays(self) -> dict[str, np.ndarray]:
        return {f"group_{name}": array for name, array in vars(self).items()}


class _Packed:
    """A step's arrays, on the host."""

    def __init__(
        self,
        *,
        input_ids: np.ndarray,
        logit_rows: list[int],
        counts: np.ndarray,
        starts: np.ndarray,
        page_table: np.ndarray,
        page_size: int,
        committed: np.ndarray,
        group: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> None:
        self.counts = counts
        self.input_ids = input_ids
        self.logit_rows = np.array(logit_rows, dtype=np.int64)
        self.cu_seqlens_q = np.zeros(len(counts) + 1, dtype=np.int32)
        np.cumsum(counts, out=self.cu_seqlens_q[1:])
        self.is_decode = len(input_ids) == len(counts) == len(logit_rows)
        if self.is_decode:
            row_of: np.ndarray = np.arange(len(counts))
            self.positions = starts
        else:
            row_of = np.repeat(np.arange(len(counts)), counts)
            first = self.cu_seqlens_q[:-1].astype(np.int64)
            self.positions = np.arange(len(input_ids)) + (starts - first)[row_of]
        self.page_table = page_table
        self.cache_seqlens = (starts + counts).astype(np.int32)
        written = self.positions >= committed[row_of]

        def slots(table: np.ndarray, places: np.ndarray) -> np.ndarray:
            pages = table[row_of, places // page_size].astype(np.int64)
            return np.where(written, pages * page_size + places % page_size, -1)

        self.slots = slots(page_table, self.positions)
        self.group: _Group | None = None
        if group is not None:
            table, dropped = group
            lengths = self.cache_seqlens - dropped.astype(np.int32)
            self.group = _Group(table, lengths, slots(table, self.positions - dropped[row_of]))
