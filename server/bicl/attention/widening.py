"""Long prefills over fp8 pages: each value is converted once, not for every tile of queries."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from bicl.attention.metadata import AttentionMetadata
from bicl.attention.pool import LayerCache
from bicl.cache.layout import PAGE_SIZES, TILE_SIZES, PageLayout
from bicl.errors import BackendError
from bicl.ops.cuda.prefill_attention import uses_wgmma
from bicl.ops.cuda.widen_pages import widen_pages

__all__ = ["MIN_ROWS", "MIN_ROWS_WITHOUT_WGMMA", "ROOM_BYTES", "PageWidener", "PrefillPart"]

log = logging.getLogger(__name__)

ROOM_BYTES = 256 << 20
"""Memory for widened pages, a device: 65,536 tokens of 8 KV heads of 128, K and V, at once."""

MIN_ROWS, MIN_ROWS_WITHOUT_WGMMA = 512, 128
"""Rows (query tokens times heads of a KV head) a sequence, on average, from which widening pays;
the second where the kernel that would read the fp8 pages cannot use Hopper's wgmma."""


@dataclass(frozen=True)
class PrefillPart:
    """KV heads of a layer that one launch of attention reads.

    Attributes:
        layer: their pages; page_table: int32 ``[B, max_pages]`` of it.
        query_heads: which heads of the query attend to them.
    """

    layer: LayerCache
    page_table: torch.Tensor
    query_heads: slice


class PageWidener:
    """Decides by which pages a prefill step is served: the cache's, or widened copies of them.

    The kernels for fp8 pages round probabilities to fp16, those for 16-bit pages to the query's
    dtype, and which of them is faster depends on the whole step. So in deterministic mode nothing
    is widened.

    The room for the copies is allocated by the first prefill over fp8 pages, whatever its size: a
    server's warm-up. It holds one layer at a time. KV heads that do not fit together take turns;
    where a single one does not fit, attention reads fp8, which ``num_too_large`` counts.

    Args:
        deterministic: never widen.
        pdl: see ``widen_pages``.
        room_bytes: memory for the copies, a device.
    """

    def __init__(
        self, *, deterministic: bool = False, pdl: bool = False, room_bytes: int = ROOM_BYTES
    ) -> None:
        self.num_too_large = 0
        self._deterministic = deterministic
        self._pdl = pdl
        self._room_bytes = room_bytes
        self._rooms: dict[torch.device, _Room] = {}

    def parts(
        self, query: torch.Tensor, layer: LayerCache, meta: AttentionMetadata
    ) -> Iterator[PrefillPart]:
        """What to attend to, part by part. A part's pages are good until the next is asked for.

        Raises:
            BackendError: the room would be allocated while a CUDA graph is captured.
        """
        heads, pages = self._heads_at_once(query, layer, meta)
        if heads == 0:
            yield PrefillPart(layer, meta.page_table, slice(None))
            return
        room, count = self._rooms[layer.device], meta.batch_size * pages
        layout = _wide_layout(layer.layout, heads, query.dtype)
        wide = room.memory[: count * layout.page_bytes].view(query.dtype)
        target = LayerCache(wide.view(layout.shape(count)), layout, layer.k_scale, layer.v_scale)
        table = room.ids[:count].view(meta.batch_size, pages)
        group = query.shape[1] // layer.layout.num_kv_heads
        for first in range(0, layer.layout.num_kv_heads, heads):
            widen_pages(
                layer,
                target,
                meta.page_table,
                meta.cache_seqlens,
                first_head=first,
                pages_per_sequence=pages,
                pdl=self._pdl,
            )
            yield PrefillPart(target, table, slice(first * group, (first + heads) * group))

    def _heads_at_once(
        self, query: torch.Tensor, layer: LayerCache, meta: AttentionMetadata
    ) -> tuple[int, int]:
        """KV heads that are widened together (0: none, attend to what is stored), and the pages
        that each sequence gets."""
        layout, batch = layer.layout, meta.batch_size
        if layout.element_bytes != 1 or self._deterministic:
            return 0, 0
        self._make_room(layer.device)
        pages = min(layout.pages_for(meta.max_k), meta.page_table.shape[1])
        rows = query.shape[0] * query.shape[1] // layout.num_kv_heads
        enough = MIN_ROWS if uses_wgmma(layer) else MIN_ROWS_WITHOUT_WGMMA
        if pages == 0 or rows < enough * batch:
            return 0, 0
        one = batch * pages * _wide_layout(layout, 1, query.dtype).page_bytes
        fitting = (n for n in range(1, layout.num_kv_heads + 1) if n * one <= self._room_bytes)
        heads = max((n for n in fitting if layout.num_kv_heads % n == 0), default=0)
        if heads == 0:
            if self.num_too_large == 0:
                log.warning(
                    "a prefill of %d sequences of up to %d tokens would take %d bytes of 16-bit "
                    "pages for one KV head, more than the %d there are: attention converts fp8 as "
                    "it goes, up to twice as slow; smaller prefill batches avoid it",
                    batch, meta.max_k, one, self._room_bytes,
                )  # fmt: skip
            self.num_too_large += 1
        return heads, pages

    def _make_room(self, device: torch.device) -> None:
        if device in self._rooms:
            return
        if torch.cuda.is_current_stream_capturing():
            raise BackendError(
                "the room for widened fp8 pages must be allocated, which a CUDA graph capture does "
                "not allow; run one prefill before capturing"
            )
        self._rooms[device] = _Room(
            torch.empty(self._room_bytes, dtype=torch.uint8, device=device),
            torch.arange(self._room_bytes // _LEAST_PAGE_BYTES, dtype=torch.int32, device=device),
        )


class _Room(NamedTuple):
    memory: torch.Tensor  # uint8
    ids: torch.Tensor  # int32, 0, 1, 2, ...: page tables of copies that lie side by side


@functools.cache
def _wide_layout(layout: PageLayout, num_kv_heads: int, dtype: torch.dtype) -> PageLayout:
    return replace(layout, num_kv_heads=num_kv_heads, dtype=dtype)


_LEAST_PAGE_BYTES = PageLayout(1, 1, torch.float16, min(PAGE_SIZES), min(TILE_SIZES)).page_bytes
