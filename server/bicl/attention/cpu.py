"""The CPU backend: attention over pages in vectorised torch.

It reads and writes every layout. Its own pools are best made with ``swizzle=False``: the chunk
permutation serves the tensor core's shared memory, which a CPU does not have, while plain rows let
a whole K or V plane be copied and multiplied as it lies.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from bicl.attention.metadata import AttentionMetadata
from bicl.attention.pool import LayerCache
from bicl.attention.rotary import Rotary
from bicl.attention.validate import (
    check_metadata,
    check_page_lists,
    check_query,
    check_rows,
    check_tensor,
)
from bicl.errors import InvalidInputError
from bicl.ops import cpu as ops

__all__ = ["CpuBackend"]

CPU = torch.device("cpu")


class CpuBackend:
    """``AttentionBackend`` on the CPU.

    Lengths, tables and slots are read on the host once a step, so they are always checked: a table
    too narrow, or a page or slot outside the pool, is refused before anything is written or read.
    A metadata object whose tensors change after ``plan`` must be planned again.
    """

    name = "cpu"

    def __init__(self) -> None:
        self._planned: tuple[AttentionMetadata, ops.StepSchedule] | None = None

    def plan(self, meta: AttentionMetadata) -> None:
        """Read the step's lengths.

        Raises:
            InvalidInputError: a wrong shape, dtype or device, lengths that decrease or exceed the
                metadata's own bounds.
        """
        self._schedule_of(meta, again=True)

    def _schedule_of(self, meta: AttentionMetadata, *, again: bool = False) -> ops.StepSchedule:
        """The schedule of ``meta``; another thread may plan its own step in between."""
        if meta.page_table.dim() == 3 and not again:
            return _schedule(meta)  # one layer's choice of pages; the step's own plan stays
        planned = self._planned
        if again or planned is None or planned[0] is not meta:
            planned = self._planned = (meta, _schedule(meta))
        return planned[1]

    def store(
        self,
        layer: LayerCache,
        key: torch.Tensor,
        value: torch.Tensor,
        slots: torch.Tensor,
        *,
        rotary: Rotary | None = None,
    ) -> None:
        """See ``AttentionBackend.store``. Slots past the pool's end raise InvalidInputError."""
        check_rows(layer, key, value, slots)
        if rotary is not None:
            ops.rotate(rotary.query, key, rotary.cos, rotary.sin)
        planned = self._planned
        if planned is not None and slots is planned[0].slot_mapping:
            index = planned[1].store_index(layer.layout, layer.num_pages)
        else:
            index = ops.StoreIndex(layer.layout, slots, layer.num_pages)
        ops.store_kv(layer.pages, layer.layout, key, value, index, layer.k_scale, layer.v_scale)

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
        """See ``AttentionBackend.run``; plans ``meta`` first if it is not the planned one."""
        check_query(layer, query, out, scale, softcap)
        schedule = self._schedule_of(meta)
        if query.shape[0] < schedule.num_rows:
            raise InvalidInputError(
                f"query has {query.shape[0]} rows, but cu_seqlens_q ends at {schedule.num_rows}"
            )
        schedule.check_pages(layer.layout.page_size, layer.num_pages)
        right = max(window_right, -1)
        options = ops.AttentionOptions(
            scale=scale,
            left=max(window_left, -1),
            right=0 if meta.causal else right,
            softcap=softcap,
            k_scale=layer.k_scale,
            v_scale=layer.v_scale,
        )
        if query.stride(-1) != 1:
            query = query.contiguous()
        out, lse = ops.paged_attention(
            query, layer.pages, layer.layout, schedule, options, out, return_lse
        )
        return out if lse is None else (out, lse)

    def gather(
        self, layer: LayerCache, page_table: torch.Tensor, cache_seqlens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``AttentionBackend.gather``."""
        check_page_lists(layer, page_table, cache_seqlens)
        lengths = cache_seqlens.tolist()
        no_queries = [0] * (len(lengths) + 1)
        schedule = ops.StepSchedule(page_table, lengths, no_queries, page_table.new_empty(0))
        schedule.check_pages(layer.layout.page_size, layer.num_pages)
        table = page_table.numpy()
        lists = [table[i, : layer.layout.pages_for(n)] for i, n in enumerate(lengths)]
        return ops.gather_kv(
            layer.pages, layer.layout, lists, lengths, layer.k_scale, layer.v_scale
        )

    def copy_pages(
        self, layers: list[LayerCache], source: torch.Tensor, target: torch.Tensor
    ) -> None:
        """See ``AttentionBackend.copy_pages``. Pages outside the pool raise InvalidInputError."""
        check_tensor("source", source, (None,), (torch.int64,), CPU)
        check_tensor("target", target, (source.shape[0],), (torch.int64,), CPU)
        if not source.numel():
            return
        last = min(layer.num_pages for layer in layers) - 1
        for name, pages in (("source", source), ("target", target)):
            if int(pages.min()) < 0 or int(pages.max()) > last:
                raise InvalidInputError(
                    f"{name} names a page outside the pool, which has pages 0..{last}: "
                    f"{pages.tolist()}"
                )
        for layer in layers:
            ops.copy_pages(layer.pages, source, target)


def _schedule(meta: AttentionMetadata) -> ops.StepSchedule:
    check_metadata(meta, CPU)
    starts, lengths = meta.cu_seqlens_q.tolist(), meta.cache_seqlens.tolist()
    queries = [end - begin for begin, end in pairwise(starts)]
    if starts[0] != 0 or min(queries, default=0) < 0:
        raise InvalidInputError(f"cu_seqlens_q must start at 0 and never fall, got {starts}")
    if min(lengths, default=0) < 0:
        raise InvalidInputError(f"cache_seqlens must not be negative, got {lengths}")
    for name, values, bound in (("max_q", queries, meta.max_q), ("max_k", lengths, meta.max_k)):
        if max(values, default=0) > bound:
            raise InvalidInputError(f"{name} is {bound}, but the step has {max(values)}")
    return ops.StepSchedule(meta.page_table, lengths, starts, meta.slot_mapping)
