"""Decode steps as CUDA graphs: one per batch size, captured once, right for any lengths."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from itertools import product
from typing import Protocol

import numpy as np
import torch

from bicl.attention.backend import AttentionBackend
from bicl.attention.metadata import AttentionMetadata
from bicl.attention.pool import KVPool
from bicl.attention.store_clock import StoreClock, time_stores
from bicl.frontends.http.engine.config import EngineConfig
from bicl.frontends.transformers.packed import PackedModel

__all__ = ["DecodeGraphs", "capture_sizes"]


def capture_sizes(max_batch_size: int) -> list[int]:
    """1, 2, 4, then steps of 8, clipped to the maximum and including it. (A54)"""
    sizes = {1, 2, 4, *range(8, max_batch_size, 8), max_batch_size}
    return sorted(size for size in sizes if size <= max_batch_size)


class _Buffers:
    """Inputs at fixed addresses, with pinned twins on the host. Rows past the batch are empty
    sequences: length 0, nothing stored. (A52, A53)"""

    def __init__(self, batch: int, max_pages: int, device: torch.device) -> None:
        shapes = {
            "input_ids": ((batch,), torch.int64, 0),
            "positions": ((batch,), torch.int64, 0),
            "page_table": ((batch, max_pages), torch.int32, 0),
            "cache_seqlens": ((batch,), torch.int32, 0),
            "slots": ((batch,), torch.int64, -1),
            "sparsity": ((batch,), torch.float32, 0),
            "group_page_table": ((batch, max_pages), torch.int32, 0),
            "group_cache_seqlens": ((batch,), torch.int32, 0),
            "group_slots": ((batch,), torch.int64, -1),
        }
        self._empty = {name: fill for name, (_, _, fill) in shapes.items()}
        self.host = {
            name: torch.full(shape, fill, dtype=dtype).pin_memory()
            for name, (shape, dtype, fill) in shapes.items()
        }
        self.device = {name: tensor.to(device) for name, tensor in self.host.items()}

    def fill(self, size: int, arrays: dict[str, np.ndarray]) -> None:
        """Copy a step's rows in and pad up to ``size``."""
        for name, array in arrays.items():
            host = self.host[name][:size]
            view = host.numpy()
            view[: len(array)] = array
            view[len(array) :] = self._empty[name]
            self.device[name][:size].copy_(host, non_blocking=True)


class GroupArrays(Protocol):
    """A step's arrays in the second page group, by the name of their buffer."""

    def arrays(self) -> dict[str, np.ndarray]: ...


@dataclass(frozen=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor
    store_seconds: float


class DecodeGraphs:
    """Captured decode steps.

    Args:
        model: as the runner calls it.
        backend: its attention.
        config: limits; graphs are made for batches up to ``max_batch_size``.
        pool: its pages, unused when graphs are captured.
        dtype: of keys and values.
        clock: told how long a replay's stores take.
    """

    def __init__(
        self,
        model: PackedModel,
        backend: AttentionBackend,
        config: EngineConfig,
        pool: KVPool,
        dtype: torch.dtype,
        clock: StoreClock,
    ) -> None:
        device = pool.layers[0].device
        self._model = model
        self._layers = pool.layers
        self._dtype = dtype
        self._clock = clock
        self._backend = backend
        self._max_k = config.max_total_tokens
        self._sizes = capture_sizes(config.max_batch_size)
        max_pages = -(-config.max_total_tokens // config.page_size)
        self._buffers = _Buffers(self._sizes[-1], max_pages, device)
        self._cu_seqlens = torch.arange(self._sizes[-1] + 1, dtype=torch.int32, device=device)
        self._rows = torch.arange(self._sizes[-1], device=device)
        # Steps in which no row leaves tiles out have graphs without scoring and selection.
        self._kinds = (False,) if config.hysparse is None or config.compact else (False, True)
        self._compact = config.compact
        self._graphs: dict[tuple[int, bool], _Graph] = {}
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.misses = 0

    def capture(self) -> None:
        """Capture every size, largest first so that the smaller ones fit into its memory.

        Other threads may use the device meanwhile, but no graph may be freed, which the garbage
        collector could do at any time.
        """
        gc.collect()
        gc.disable()
        try:
            self._capture()
        finally:
            gc.enable()

    def _capture(self) -> None:
        pool = None
        for size, sparse in product(reversed(self._sizes), self._kinds):
            self._buffers.fill(
                size, {name: t[:0].numpy() for name, t in self._buffers.host.items()}
            )
            arguments = self._arguments(size, sparse)
            self._model(*arguments)  # lazy initialisation must not happen during capture
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                logits = self._model(*arguments)
            pool = pool or graph.pool()
            rotary = self._model.rotary_shape
            seconds = time_stores(self._backend, self._layers, size, self._dtype, rotary)
            self._graphs[size, sparse] = _Graph(graph, logits, seconds)
        self._copied.record()

    def replay(
        self,
        input_ids: np.ndarray,
        positions: np.ndarray,
        page_table: np.ndarray,
        cache_seqlens: np.ndarray,
        slots: np.ndarray,
        sparsity: np.ndarray | None = None,
        group: GroupArrays | None = None,
    ) -> torch.Tensor | None:
        """Logits of a decode step, or ``None`` if no captured size is large enough (counted)."""
        batch = len(input_ids)
        size = next((size for size in self._sizes if size >= batch), None)
        key = size or 0, sparsity is not None
        if size is None or key not in self._graphs:
            self.misses += 1
            return None
        self._copied.synchronize()  # the pinned buffers may still be on their way
        self._buffers.fill(
            size,
            {
                "input_ids": input_ids,
                "positions": positions,
                "page_table": page_table,
                "cache_seqlens": cache_seqlens,
                "slots": slots,
                **({} if sparsity is None else {"sparsity": sparsity}),
                **({} if group is None else group.arrays()),
            },
        )
        self._copied.record()
        captured = self._graphs[key]
        captured.graph.replay()
        self._clock.replayed(captured.store_seconds)
        return captured.logits[:batch].clone()

    def _arguments(
        self, size: int, sparse: bool
    ) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata, torch.Tensor]:
        buffers = self._buffers.device
        meta = AttentionMetadata(
            page_table=buffers["page_table"][:size],
            cache_seqlens=buffers["cache_seqlens"][:size],
            cu_seqlens_q=self._cu_seqlens[: size + 1],
            slot_mapping=buffers["slots"][:size],
            max_q=1,
            max_k=self._max_k,
            sparsity=buffers["sparsity"][:size] if sparse else None,
        )
        if self._compact:
            group = replace(
                meta,
                page_table=buffers["group_page_table"][:size],
                cache_seqlens=buffers["group_cache_seqlens"][:size],
                slot_mapping=buffers["group_slots"][:size],
            )
            meta = replace(meta, compact=group)
        return buffers["input_ids"][:size], buffers["positions"][:size], meta, self._rows[:size]
