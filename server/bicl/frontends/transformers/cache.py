"""transformers caches over BICL pages: one that an engine drives, one that owns its pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from bicl.attention.backend import AttentionBackend, make_backend
from bicl.attention.metadata import AttentionMetadata
from bicl.attention.pool import KVPool
from bicl.attention.rotary import Rotary
from bicl.attention.store_clock import StoreClock
from bicl.cache.tiers import Fetch
from bicl.errors import InvalidInputError
from bicl.frontends.transformers.geometry import inspect_model
from bicl.frontends.transformers.rows import LayerRows, PagedCache

__all__ = ["BiclCache", "PackedCache"]


class PackedCache(PagedCache):
    """For an engine: ``input_ids`` and ``position_ids`` are ``[1, T]``, all sequences of the step
    packed one after the other, and :attr:`meta` says what they are. The engine owns the pages.

    Args:
        pool: pages of every layer.
        backend: runs attention on them.

    Attributes:
        meta: the step's metadata; set before every forward call.
        arrivals: copies of pages under way, which each layer joins before it reads them.
        clock: times the store of its layer; ``None``: nothing is timed.
        rotary_shape: query heads and turned dims of layers that leave turning to ``attend``;
            ``None``: no layer has done so.
    """

    rotates = True

    def __init__(self, pool: KVPool, backend: AttentionBackend) -> None:
        super().__init__()
        self.pool = pool
        self.backend = backend
        self.meta: AttentionMetadata | None = None
        self.arrivals: Sequence[Fetch] = ()
        self.clock: StoreClock | None = None
        self.rotary_shape: tuple[int, int] | None = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions are always given; the models' own guess is never used

    def attend(
        self,
        rows: LayerRows,
        query: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        scale: float,
        window_left: int,
        softcap: float,
    ) -> torch.Tensor:
        meta = self.meta
        if meta is None:
            raise InvalidInputError("set PackedCache.meta before calling the model")
        for fetch in self.arrivals:
            fetch.join(rows.layer_idx)
        layer = self.pool.layers[rows.layer_idx]
        clock = self.clock
        if clock is not None and clock.layer != rows.layer_idx:
            clock = None
        if clock is not None:
            clock.begin()
        queries = query[0].transpose(0, 1)
        if rows.rotary is not None:
            self.rotary_shape = queries.shape[1], rows.rotary[0].shape[-1]
        self.backend.store(
            layer,
            rows.key[0].transpose(0, 1),
            rows.value[0].transpose(0, 1),
            meta.slot_mapping,
            rotary=None if rows.rotary is None else Rotary(queries, *rows.rotary),
        )
        if clock is not None:
            clock.end()
        out = self.backend.run(
            queries,
            layer,
            meta,
            scale=scale,
            window_left=window_left,
            softcap=softcap,
        )
        assert isinstance(out, torch.Tensor)
        return out.unsqueeze(0)


@dataclass(frozen=True)
class _Step:
    """``keep``: int64 indexes of the unmasked tokens among ``B * T``; ``None`` if all are."""

    meta: AttentionMetadata
    keep: torch.Tensor | None


class BiclCache(PagedCache):
    """For ``model.generate(..., past_key_values=BiclCache(model))`` and plain forward calls.

    Takes batches and padding (tokens whose ``attention_mask`` is 0 are not stored), chunks, crop
    and reuse over several calls; no beam search. It owns its pages and doubles them when they are
    full.

    Args:
        model: loaded with ``attn_implementation="bicl"``.
        page_size: tokens a page, 64 or 32.
        dtype: stored dtype; ``None`` is the model's.
        backend: ``None`` chooses the one of the model's device.
        num_pages: pages to begin with.

    Raises:
        ConfigError: the model cannot run on pages; the message says why.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        page_size: int = 64,
        dtype: torch.dtype | None = None,
        backend: AttentionBackend | None = None,
        num_pages: int = 16,
    ) -> None:
        super().__init__()
        self.device = model.device
        self.backend = backend or make_backend(self.device.type)
        self._layouts = inspect_model(model).layouts(
            dtype or model.dtype,
            page_size=page_size,
            tile=page_size,
            swizzle=self.device.type == "cuda",
        )
        self.page_size = page_size
        self.pool = KVPool(self._layouts, num_pages, self.device)
        self.reset()

    def reset(self) -> None:
        """Forget everything; pages are kept for reuse."""
        self._next_page = 0
        self._free_pages: list[int] = []
        self._tables: list[list[int]] = []
        # [B, columns seen] True where a token is stored: one row a sequence.
        self._stored = np.zeros((0, 0), dtype=bool)
        self._step: _Step | None = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns seen, padding included: what ``attention_mask`` is aligned to."""
        return self._stored.shape[1]

    @property
    def is_croppable(self) -> bool:
        return True

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``abs(tokens_to_remove)`` columns."""
        keep = max(0, self._stored.shape[1] - abs(tokens_to_remove))
        self._stored = self._stored[:, :keep]
        for table, length in zip(self._tables, self._stored.sum(axis=1), strict=True):
            used = -(-int(length) // self.page_size)
            self._free_pages += table[used:]
            del table[used:]

    def attend(
        self,
        rows: LayerRows,
        query: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        scale: float,
        window_left: int,
        softcap: float,
    ) -> torch.Tensor:
        batch, heads, tokens, dim = query.shape
        if rows.layer_idx == 0:
            self._step = self._plan(batch, tokens, mask)
        step = self._step
        if step is None:
            raise InvalidInputError("the model's layers must be called in order, beginning at 0")
        layer = self.pool.layers[rows.layer_idx]
        key, value = _packed(rows.key, step.keep), _packed(rows.value, step.keep)
        self.backend.store(layer, key, value, step.meta.slot_mapping)
        out = self.backend.run(
            _packed(query, step.keep),
            layer,
            step.meta,
            scale=scale,
            window_left=window_left,
            softcap=softcap,
        )
        assert isinstance(out, torch.Tensor)
        if step.keep is not None:
            out = out.new_zeros(batch * tokens, heads, dim).index_copy_(0, step.keep, out)
        return out.view(batch, tokens, heads, dim)

    def _plan(self, batch: int, tokens: int, mask: torch.Tensor | None) -> _Step:
        """Allocate the step's pages and describe it."""
        new = self._take_columns(batch, tokens, mask)
        after = self._stored.sum(axis=1)
        before = after - new.sum(axis=1)
        for table, length in zip(self._tables, after, strict=True):
            while len(table) * self.page_size < length:
                table.append(self._allocate())
        page_table = np.zeros((batch, max(map(len, self._tables))), dtype=np.int32)
        for row, table in enumerate(self._tables):
            page_table[row, : len(table)] = table
        row_of, _ = new.nonzero()
        position = (before[:, None] + new.cumsum(axis=1) - 1)[new]
        slots = page_table[row_of, position // self.page_size].astype(np.int64)
        slots = slots * self.page_size + position % self.page_size
        meta = AttentionMetadata(
            page_table=self._tensor(page_table),
            cache_seqlens=self._tensor(after.astype(np.int32)),
            cu_seqlens_q=self._tensor(np.r_[0, (after - before).cumsum()].astype(np.int32)),
            slot_mapping=self._tensor(slots),
            max_q=int((after - before).max()),
            max_k=int(after.max()),
        )
        self.backend.plan(meta)
        keep = None if new.all() else self._tensor(np.flatnonzero(new))
        return _Step(meta, keep)

    def _take_columns(self, batch: int, tokens: int, mask: torch.Tensor | None) -> np.ndarray:
        """Append the step's columns; returns bool ``[B, T]``: which of them hold a token."""
        if not self._tables:
            self._tables = [[] for _ in range(batch)]
            self._stored = np.zeros((batch, 0), dtype=bool)
        if len(self._tables) != batch:
            raise InvalidInputError(
                f"this cache holds {len(self._tables)} sequences, the call has {batch}; "
                "use a new BiclCache, or reset()"
            )
        seen = self._stored.shape[1]
        if mask is None:
            columns = np.ones((batch, seen + tokens), dtype=bool)
        else:
            columns = mask.bool().cpu().numpy()
            if columns.shape != (batch, seen + tokens):
                raise InvalidInputError(
                    f"attention_mask is {columns.shape}; {(batch, seen + tokens)} is needed: one "
                    f"column for each of {seen} cached and {tokens} new tokens"
                )
        if not np.array_equal(columns[:, :seen], self._stored):
            raise InvalidInputError(
                "attention_mask differs from the earlier calls' for tokens already cached"
            )
        self._stored = columns
        return columns[:, seen:]

    def _allocate(self) -> int:
        if self._free_pages:
            return self._free_pages.pop()
        if self._next_page == self.pool.num_pages:
            self._grow()
        self._next_page += 1
        return self._next_page - 1

    def _grow(self) -> None:
        """Twice the pages; page ids keep their meaning."""
        old = self.pool
        self.pool = KVPool(self._layouts, 2 * old.num_pages, self.device)
        for source, target in zip(old.layers, self.pool.layers, strict=True):
            target.pages[: old.num_pages].copy_(source.pages)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)


def _packed(x: torch.Tensor, keep: torch.Tensor | None) -> torch.Tensor:
    """``[B, H, T, D]`` to ``[tokens, H, D]``, masked tokens left out."""
    x = x.transpose(1, 2).flatten(0, 1)
    return x if keep is None else x[keep]
