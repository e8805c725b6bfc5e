"""Memory and page tables that all contestants share.

One arena of random bf16 numbers is read by everybody, each through a view in the layout it wants:
nobody profits from a smaller or warmer buffer. Pages are a random permutation of the whole view,
cut into disjoint sets between which the calls rotate.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from bench.kernels.shapes import HEAD_DIM, Heads, PrefillShape, kv_bytes, latent_bytes
from bench.timing import num_rotations
from bicl.attention.metadata import AttentionMetadata
from bicl.attention.mla import LATENT_DIM
from bicl.attention.pool import LayerCache
from bicl.cache.layout import PageLayout

__all__ = ["Arena", "LatentBatch", "PagedBatch"]

_CHUNK = 1 << 28


class Arena:
    """Random K and V. ``flat`` holds bf16, ``flat8`` half as many bytes of e4m3."""

    def __init__(self, num_bytes: int, device: torch.device | str = "cuda") -> None:
        self.device = torch.device(device)
        self.flat = torch.empty(num_bytes // 2, dtype=torch.bfloat16, device=device)
        for part in self.flat.split(_CHUNK):
            part.normal_()

    @cached_property
    def flat8(self) -> torch.Tensor:
        result = torch.empty(self.flat.numel(), dtype=torch.float8_e4m3fn, device=self.device)
        for source, target in zip(self.flat.split(_CHUNK), result.split(_CHUNK), strict=True):
            target.copy_(source)
        return result

    @property
    def num_bytes(self) -> int:
        return self.flat.numel() * 2

    def token_major(
        self, num_pages: int, page_size: int, kv_heads: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as two tensors ``[num_pages, page_size, kv_heads, head_dim]`` (NHD)."""
        shape = (num_pages, page_size, kv_heads, HEAD_DIM)
        count = num_pages * page_size * kv_heads * HEAD_DIM
        half = self.flat.numel() // 2
        return self.flat[:count].view(shape), self.flat[half : half + count].view(shape)

    def contiguous(
        self, index: int, batch: int, length: int, kv_heads: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Set ``index`` of K and V without pages: ``[batch, kv_heads, length, head_dim]``."""
        count = batch * kv_heads * length * HEAD_DIM
        half = self.flat.numel() // 2
        start = index * count
        shape = (batch, kv_heads, length, HEAD_DIM)
        return (
            self.flat[start : start + count].view(shape),
            self.flat[half + start : half + start + count].view(shape),
        )

    def tiles(self, layout: PageLayout, num_pages: int) -> LayerCache:
        """BICL pages over the same bytes (over ``flat8`` for a one-byte dtype)."""
        source = self.flat if layout.element_bytes == 2 else self.flat8
        shape = layout.shape(num_pages)
        count = num_pages * layout.page_bytes // layout.element_bytes
        return LayerCache(source[:count].view(layout.dtype).view(shape), layout)


@dataclass
class PagedBatch:
    """One batch of sequences whose pages lie scattered over the arena.

    Attributes:
        lengths: keys of each sequence.
        new_tokens: queries of each sequence (all 1 in decode).
        rotations: disjoint sets of pages.
    """

    arena: Arena
    heads: Heads
    lengths: tuple[int, ...]
    new_tokens: tuple[int, ...]
    rotations: int

    @classmethod
    def decode(cls, arena: Arena, heads: Heads, lengths: tuple[int, ...]) -> PagedBatch:
        rotations = num_rotations(kv_bytes(lengths, heads.kv), arena.num_bytes)
        return cls(arena, heads, lengths, (1,) * len(lengths), cls._fitting(lengths, rotations))

    @classmethod
    def prefill(cls, arena: Arena, heads: Heads, shape: PrefillShape) -> PagedBatch:
        """Prefill is bound by arithmetic; two sets are enough to keep the last call's KV out."""
        return cls(arena, heads, shape.total_tokens, shape.new_tokens, 2)

    @staticmethod
    def _fitting(lengths: tuple[int, ...], rotations: int) -> int:
        """Fewer sets where rounding up to 128-token pages would not fit them all."""
        padded = sum(-(-length // 128) * 128 for length in lengths)
        return max(1, rotations * sum(lengths) // padded)

    def pages(self, page_size: int) -> list[int]:
        """Pages of each sequence."""
        return [-(-length // page_size) for length in self.lengths]

    def num_pages(self, page_size: int) -> int:
        """Pages of all sets."""
        return self.rotations * sum(self.pages(page_size))

    def page_ids(self, page_size: int) -> list[torch.Tensor]:
        """For each set the page ids of all sequences in a row, int32; a random permutation."""
        order = torch.randperm(self.num_pages(page_size), device=self.arena.device)
        return [ids.contiguous() for ids in order.to(torch.int32).chunk(self.rotations)]

    def page_tables(self, page_size: int) -> list[torch.Tensor]:
        """For each set int32 ``[batch, max_pages]``; unused entries are 0."""
        counts = self.pages(page_size)
        used = torch.arange(max(counts), device=self.arena.device)[None, :] < torch.tensor(
            counts, device=self.arena.device
        ).unsqueeze(1)
        tables = []
        for ids in self.page_ids(page_size):
            table = torch.zeros(used.shape, dtype=torch.int32, device=self.arena.device)
            table[used] = ids
            tables.append(table)
        return tables

    def _running(self, counts: tuple[int, ...] | list[int]) -> torch.Tensor:
        total = torch.tensor([0, *counts]).cumsum(0)
        return total.to(device=self.arena.device, dtype=torch.int32)

    def page_indptr(self, page_size: int) -> torch.Tensor:
        """Running sum of page counts, int32 ``[batch + 1]``."""
        return self._running(self.pages(page_size))

    def last_page_len(self, page_size: int) -> torch.Tensor:
        """Tokens in each sequence's last page, int32 ``[batch]``."""
        last = [(length - 1) % page_size + 1 for length in self.lengths]
        return torch.tensor(last, dtype=torch.int32, device=self.arena.device)

    @cached_property
    def cu_seqlens_q(self) -> torch.Tensor:
        return self._running(self.new_tokens)

    @cached_property
    def cache_seqlens(self) -> torch.Tensor:
        return torch.tensor(self.lengths, dtype=torch.int32, device=self.arena.device)

    @cached_property
    def query(self) -> torch.Tensor:
        """bf16 ``[sum(new_tokens), query heads, head_dim]``."""
        shape = (sum(self.new_tokens), self.heads.query, HEAD_DIM)
        return torch.randn(shape, dtype=torch.bfloat16, device=self.arena.device)

    def metadata(self, page_size: int) -> list[AttentionMetadata]:
        """The step's metadata for each set; the new tokens are already stored."""
        slots = torch.full((sum(self.new_tokens),), -1, dtype=torch.int64, device=self.arena.device)
        return [
            AttentionMetadata(
                page_table=table,
                cache_seqlens=self.cache_seqlens,
                cu_seqlens_q=self.cu_seqlens_q,
                slot_mapping=slots,
                max_q=max(self.new_tokens),
                max_k=max(self.lengths),
            )
            for table in self.page_tables(page_size)
        ]


class LatentBatch(PagedBatch):
    """One decode step over latents: 576 elements a token for all heads, in pages of 64."""

    @classmethod
    def decode(cls, arena: Arena, heads: Heads, lengths: tuple[int, ...]) -> LatentBatch:
        rotations = num_rotations(latent_bytes(lengths), arena.num_bytes)
        return cls(arena, heads, lengths, (1,) * len(lengths), cls._fitting(lengths, rotations))

    @cached_property
    def query(self) -> torch.Tensor:
        """bf16 ``[batch, query heads, 576]``."""
        shape = (len(self.lengths), self.heads.query, LATENT_DIM)
        return torch.randn(shape, dtype=torch.bfloat16, device=self.arena.device)
