"""All decode rows of a step in one computation, over chunks of equally many pages."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from bicl.cache.layout import PageLayout
from bicl.ops.cpu.dense import Partial, attend, mask_bias
from bicl.ops.cpu.gather import PageLoader, Scratch

__all__ = ["DecodeBatch", "DecodeChunks"]


@dataclass(frozen=True)
class DecodeChunks:
    """Pages of all decode rows, cut into chunks of equally many pages.

    Attributes:
        index: for ``PageLoader``.
        count: number of chunks.
        row_of_chunk: int64 ``[count]``; None where each row is one chunk.
        span: tokens of a chunk that count, where they are the same in all chunks; else None.
        mask: bool ``[count, 1, 1, tokens]``, True = counts; None if ``span`` says it.
        unused: int64, flat ``[count * H * 2 * tokens]`` numbers of the tokens that do not count.
    """

    index: torch.Tensor
    count: int
    row_of_chunk: torch.Tensor | None
    span: tuple[int, int] | None
    mask: torch.Tensor | None
    unused: torch.Tensor | None


class DecodeBatch:
    """What decode needs in every layer of one layout: memory for K and V, views into it, the mask.

    Args:
        num_rows: decode rows.
        dtype: of the computation.
    """

    def __init__(
        self, layout: PageLayout, chunks: DecodeChunks, num_rows: int, dtype: torch.dtype
    ) -> None:
        self._chunks = chunks
        self._loader = PageLoader(layout, chunks.index, chunks.count, dtype, Scratch())
        self._tokens = self._loader.rows.view(-1, layout.padded_head_dim)
        seen = self._loader.rows[..., : layout.head_dim]
        if chunks.span is not None:
            seen = seen[..., chunks.span[0] : chunks.span[1], :]
        self._key, self._value = seen[:, :, 0], seen[:, :, 1]
        self._bias = None if chunks.mask is None else mask_bias(chunks.mask, dtype)
        self._query_shape = (num_rows, layout.num_kv_heads, -1, layout.head_dim)
        self._dtype = dtype

    def run(
        self, query: torch.Tensor, pages: torch.Tensor, *, scale: float, softcap: float
    ) -> Partial:
        """Attention of ``query`` ``[rows, Hq, d]`` over one layer's pages.

        Returns:
            ``[rows, H, group, d]`` and LSE ``[rows, H, group]``.
        """
        chunks = self._chunks
        self._loader.load(pages)
        if chunks.unused is not None:
            # Slots that nobody wrote may hold NaN, and 0 x NaN is NaN.
            self._tokens.index_fill_(0, chunks.unused, 0.0)
        grouped = query.to(self._dtype).view(self._query_shape)
        if chunks.row_of_chunk is not None:
            grouped = grouped.index_select(0, chunks.row_of_chunk)
        part = attend(
            grouped, self._key, self._value, scale=scale, softcap=softcap, bias=self._bias
        )
        if chunks.row_of_chunk is None:
            return part
        return _combine(part, chunks.row_of_chunk, query.shape[0])


def _combine(part: Partial, row_of_chunk: torch.Tensor, num_rows: int) -> Partial:
    """Merge the chunks of each row by their LSE."""
    out, lse = part
    top = lse.new_full((num_rows, *lse.shape[1:]), -math.inf)
    top.scatter_reduce_(0, row_of_chunk[:, None, None].expand_as(lse), lse, "amax")
    weight = (lse - top.index_select(0, row_of_chunk)).exp_()
    total = torch.zeros_like(top).index_add_(0, row_of_chunk, weight)
    weighted = out.float() * weight[..., None]
    merged = weighted.new_zeros((num_rows, *out.shape[1:])).index_add_(0, row_of_chunk, weighted)
    return merged / total[..., None], top + total.log()
