"""One step, laid out for the CPU: which rows decode together, which pages each of them reads.

Made once a step from the metadata. Page addresses depend on the layout and the window of a layer,
so they are made on first use and kept for the other layers that share them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from bicl.cache.layout import PageLayout
from bicl.errors import InvalidInputError
from bicl.ops.cpu.addressing import plane_index
from bicl.ops.cpu.decode import DecodeBatch, DecodeChunks
from bicl.ops.cpu.gather import Scratch
from bicl.ops.cpu.store_kv import StoreIndex

__all__ = ["PrefillPages", "Sequence", "StepSchedule"]

# Extra work of one chunk (call, combine) in pages, in the choice of the chunk size.
CHUNK_OVERHEAD_PAGES = 0.5


@dataclass(frozen=True)
class Sequence:
    """One sequence with at least one query row and one key."""

    number: int
    first_row: int
    rows: int
    keys: int

    def first_key(self, left: int) -> int:
        """First key that any row sees; ``left`` counts keys before its own, -1 is unlimited."""
        return 0 if left < 0 else max(0, self.keys - self.rows - left)


@dataclass(frozen=True)
class PrefillPages:
    """Pages of one sequence that its rows see; ``begin:end`` are the tokens that count."""

    index: torch.Tensor
    begin: int
    end: int


class StepSchedule:
    """Host view of one step.

    Args:
        page_table: int32 ``[B, max_pages]``, or ``[B, H, max_pages]`` where all queries decode.
        cache_seqlens, cu_seqlens_q: as in the metadata, as host lists.
        slots: int64 ``[T]``, where the new tokens go.
    """

    def __init__(
        self,
        page_table: torch.Tensor,
        cache_seqlens: list[int],
        cu_seqlens_q: list[int],
        slots: torch.Tensor,
    ) -> None:
        self.page_table = page_table.numpy()
        self.slots = slots
        self.cache_seqlens = cache_seqlens
        self.num_rows = cu_seqlens_q[-1]
        spans = zip(cu_seqlens_q[:-1], cu_seqlens_q[1:], cache_seqlens, strict=True)
        active = [
            Sequence(number, first, last - first, keys)
            for number, (first, last, keys) in enumerate(spans)
            if last > first and keys > 0
        ]
        self.decode = [s for s in active if s.rows == 1]
        self.prefill = [s for s in active if s.rows > 1]
        self._store: dict[tuple[PageLayout, int], StoreIndex] = {}
        self._chunks: dict[tuple[PageLayout, int], DecodeChunks] = {}
        self._pages: dict[tuple[PageLayout, int, int], PrefillPages] = {}
        self._batches: dict[tuple[PageLayout, int, torch.dtype], DecodeBatch] = {}
        self._checked: set[tuple[int, int]] = set()
        self.scratch = Scratch()

    @cached_property
    def decode_rows(self) -> torch.Tensor | None:
        """int64 rows of the decoding sequences; None if they are all rows, in order."""
        rows = [s.first_row for s in self.decode]
        return None if rows == list(range(self.num_rows)) else torch.tensor(rows)

    def leaves_rows(self, num_rows: int, right: int) -> bool:
        """Whether some of ``num_rows`` query rows see no key and must be cleared."""
        covered = sum(s.rows for s in self.decode) + sum(s.rows for s in self.prefill)
        return covered < num_rows or (
            right >= 0 and any(s.rows > s.keys + right for s in self.prefill)
        )

    def check_pages(self, page_size: int, num_pages: int) -> None:
        """Refuse lengths that the table cannot hold and ids outside the pool; once a step.

        Raises:
            InvalidInputError: naming sequence, value and limit.
        """
        if (page_size, num_pages) in self._checked:
            return
        width = self.page_table.shape[-1]
        lengths = np.array(self.cache_seqlens, dtype=np.int64)
        long = (lengths > width * page_size).nonzero()[0]
        if long.size:
            keys = int(lengths[long[0]])
            raise InvalidInputError(
                f"cache_seqlens[{long[0]}] is {keys}, but page_table has {width} columns of "
                f"{page_size} tokens ({width * page_size}); give it {-(-keys // page_size)} columns"
            )
        used = np.arange(width) * page_size < lengths[:, None]
        if self.page_table.ndim == 3:
            used = used[:, None]
        wrong = used & ((self.page_table < 0) | (self.page_table >= num_pages))
        if wrong.any():
            place = tuple(int(where[0]) for where in wrong.nonzero())
            raise InvalidInputError(
                f"page_table[{', '.join(map(str, place))}] is {self.page_table[place]}, but the "
                f"pool has pages 0..{num_pages - 1}; sequence {place[0]} has "
                f"{self.cache_seqlens[place[0]]} tokens, so this entry is in use"
            )
        self._checked.add((page_size, num_pages))

    def store_index(self, layout: PageLayout, num_pages: int) -> StoreIndex:
        """Addresses of this step's slots; also checks the table, before anything is written."""
        wanted = (layout, num_pages)
        if wanted not in self._store:
            self.check_pages(layout.page_size, num_pages)
            self._store[wanted] = StoreIndex(layout, self.slots, num_pages)
        return self._store[wanted]

    def prefill_pages(self, layout: PageLayout, sequence: Sequence, left: int) -> PrefillPages:
        """Pages that the rows of one sequence see under a window of ``left``."""
        wanted = (layout, sequence.number, left)
        if wanted not in self._pages:
            size = layout.page_size
            low = sequence.first_key(left)
            first, last = low // size, -(-sequence.keys // size)
            ids = self.page_table[sequence.number, first:last]
            begin = low - first * size
            self._pages[wanted] = PrefillPages(
                plane_index(layout, ids[None]), begin, begin + sequence.keys - low
            )
        return self._pages[wanted]

    def decode_chunks(self, layout: PageLayout, left: int) -> DecodeChunks:
        """Pages of all decode rows under a window of ``left``."""
        wanted = (layout, left)
        if wanted not in self._chunks:
            self._chunks[wanted] = self._make_chunks(layout, left)
        return self._chunks[wanted]

    def decode_batch(self, layout: PageLayout, left: int, dtype: torch.dtype) -> DecodeBatch:
        """The decode rows' keys under a window of ``left``, computed on in ``dtype``."""
        wanted = (layout, left, dtype)
        if wanted not in self._batches:
            chunks = self.decode_chunks(layout, left)
            self._batches[wanted] = DecodeBatch(layout, chunks, len(self.decode), dtype)
        return self._batches[wanted]

    def _make_chunks(self, layout: PageLayout, left: int) -> DecodeChunks:
        size = layout.page_size
        low = np.array([s.first_key(left) for s in self.decode])
        high = np.array([s.keys for s in self.decode])
        first = low // size
        pages = (high - 1) // size + 1 - first
        per_chunk = _chunk_pages(pages)
        chunks = -(-pages // per_chunk)
        row = np.repeat(np.arange(len(pages)), chunks)
        nth = np.arange(len(row)) - (np.cumsum(chunks) - chunks)[row]
        column = (first[row] + nth * per_chunk)[:, None] + np.arange(per_chunk)
        # Columns past a row's last page repeat that page; the mask drops what they hold.
        column = np.minimum(column, (first + pages - 1)[row, None])
        sequence = np.array([s.number for s in self.decode])[row]
        index = plane_index(layout, self._pages_at(layout, sequence, column))
        start = (first[row] + nth * per_chunk) * size
        begin = np.maximum(low[row] - start, 0)
        end = np.minimum(high[row] - start, per_chunk * size)
        count = len(row)
        row_of_chunk = None if count == len(pages) else torch.from_numpy(row)
        if (begin == begin[0]).all() and (end == end[0]).all():
            span = (int(begin[0]), int(end[0]))
            return DecodeChunks(index, count, row_of_chunk, span, None, None)
        token = np.arange(per_chunk * size)
        valid = (token >= begin[:, None]) & (token < end[:, None])
        chunk, place = (~valid).nonzero()
        planes = np.arange(layout.num_kv_heads * layout.planes)
        unused = (chunk[:, None] * len(planes) + planes) * len(token) + place[:, None]
        mask = torch.from_numpy(valid)[:, None, None, :]
        unused = torch.from_numpy(unused.reshape(-1))
        return DecodeChunks(index, count, row_of_chunk, None, mask, unused)

    def _pages_at(self, layout: PageLayout, sequence: np.ndarray, column: np.ndarray) -> np.ndarray:
        """Ids at ``column`` ``[chunks, pages]`` of the chunks' sequences, for all or each head."""
        if self.page_table.ndim == 2:
            return np.asarray(self.page_table[sequence[:, None], column])
        if self.page_table.shape[1] != layout.num_kv_heads:
            raise InvalidInputError(
                f"page_table has lists for {self.page_table.shape[1]} heads, the layer has "
                f"{layout.num_kv_heads} KV heads; give one list for each, or one for all"
            )
        head = np.arange(layout.num_kv_heads)[:, None]
        return np.asarray(self.page_table[sequence[:, None, None], head, column[:, None]])


def _chunk_pages(pages: np.ndarray) -> int:
    """Pages a chunk that keep padding small when lengths are skewed.

    One chunk a row is best where lengths are alike; 8 rows of 16 pages beside one of 128 would
    read 9 x 128 pages that way, and 256 with chunks of 16.
    """
    longest = int(pages.max())
    if (pages == longest).all():
        return longest
    candidates = [longest] + [1 << bit for bit in range(longest.bit_length()) if 1 << bit < longest]

    def cost(size: int) -> float:
        chunks = int((-(-pages // size)).sum())
        return chunks * (size + CHUNK_OVERHEAD_PAGES) + (len(pages) if size < longest else 0)

    return min(candidates, key=cost)
