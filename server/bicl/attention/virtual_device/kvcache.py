"""One call of ``flash_attn_with_kvcache``: what was passed, what was appended, what is attended."""

from __future__ import annotations

import torch

from bicl.attention.pool import LayerCache
from bicl.attention.validate import QUERY_DTYPES, check_no_grad, check_tensor
from bicl.attention.virtual_device.append import Places, Rotary, write_token_major
from bicl.attention.virtual_device.arguments import INT32, check_cu_seqlens, check_groups, require
from bicl.attention.virtual_device.core import (
    FP8,
    Keys,
    Options,
    Queries,
    backend_for,
    keys_from_rows,
    sequence_of_rows,
)
from bicl.errors import InvalidInputError, UnsupportedError

__all__ = ["KVCacheCall"]


class KVCacheCall:
    """Checks the arguments on construction; then ``append`` (optional), ``queries``, ``keys()``.

    Arguments are those of ``flash_attn_with_kvcache``.
    """

    def __init__(
        self,
        *,
        q: torch.Tensor,
        qv: torch.Tensor | None,
        k_cache: torch.Tensor | LayerCache,
        v_cache: torch.Tensor | LayerCache | None,
        cache_seqlens: int | torch.Tensor | None,
        cache_batch_idx: torch.Tensor | None,
        cache_leftpad: torch.Tensor | None,
        page_table: torch.Tensor | None,
        cu_seqlens_q: torch.Tensor | None,
        max_seqlen_q: int | None,
        options: Options,
    ) -> None:
        self._options = options
        self.queries = _queries(q, qv, cu_seqlens_q, max_seqlen_q)
        self._batch = self.queries.starts.shape[0] - 1
        self._device = q.device
        self._layer: LayerCache | None = None
        self._rows: tuple[torch.Tensor, torch.Tensor] | None = None
        if isinstance(k_cache, LayerCache):
            self._num_pages = k_cache.num_pages
            self._layer = _handle(k_cache, v_cache, self.queries, options, cache_leftpad)
            self._head_dims = (k_cache.layout.head_dim,) * 2
            self._num_heads = k_cache.layout.num_kv_heads
            size = k_cache.layout.page_size
            require(page_table is not None, "a LayerCache needs page_table")
        else:
            self._rows = _token_major(k_cache, v_cache, self.queries)
            self._num_pages = k_cache.shape[0]
            self._head_dims = (k_cache.shape[-1], self._rows[1].shape[-1])
            self._num_heads = k_cache.shape[2]
            size = k_cache.shape[1]
        check_groups(q.shape[-2], self._num_heads)
        self._places = Places(self._table(page_table, cache_batch_idx, k_cache), size)
        self._leftpad = cache_leftpad
        if cache_leftpad is not None:
            check_tensor("cache_leftpad", cache_leftpad, (self._batch,), INT32, self._device)
        self._lengths = self._known_lengths(cache_seqlens)
        self._has_lengths = cache_seqlens is not None

    def _table(
        self,
        page_table: torch.Tensor | None,
        batch_idx: torch.Tensor | None,
        k_cache: torch.Tensor | LayerCache,
    ) -> torch.Tensor:
        """int32 ``[B, columns]``; a padded batch is one column a sequence."""
        if page_table is None:
            assert isinstance(k_cache, torch.Tensor)
            number = torch.arange(k_cache.shape[0], dtype=torch.int32, device=self._device)
            page_table = number[:, None]
        else:
            check_tensor("page_table", page_table, (None, None), INT32, self._device)
        if batch_idx is not None:
            check_tensor("cache_batch_idx", batch_idx, (self._batch,), INT32, self._device)
            if batch_idx.device.type == "cpu" and batch_idx.numel():
                low, high = int(batch_idx.min()), int(batch_idx.max())
                require(
                    low >= 0 and high < page_table.shape[0],
                    f"cache_batch_idx must lie in 0..{page_table.shape[0] - 1}, got "
                    f"{batch_idx.tolist()}",
                )
            page_table = page_table.index_select(0, batch_idx)
        require(
            page_table.shape[0] == self._batch,
            f"q has {self._batch} sequences, but the cache (or page_table) has "
            f"{page_table.shape[0]}; pass cache_batch_idx to choose among them",
        )
        return page_table

    def _known_lengths(self, cache_seqlens: int | torch.Tensor | None) -> torch.Tensor:
        if cache_seqlens is None:
            if self._layer is not None:
                raise InvalidInputError("cache_seqlens is needed with a LayerCache")
            cache_seqlens = self._places.capacity
        if isinstance(cache_seqlens, int):
            cache_seqlens = torch.full(
                (self._batch,), cache_seqlens, dtype=torch.int32, device=self._device
            )
        check_tensor("cache_seqlens", cache_seqlens, (self._batch,), INT32, self._device)
        self._places.check(cache_seqlens, self._num_pages, self._leftpad)
        return cache_seqlens

    def refuse_without_append(self, **arguments: torch.Tensor | None) -> None:
        """Arguments that mean nothing unless ``k`` and ``v`` are appended."""
        for name, value in arguments.items():
            require(value is None, f"{name} needs k and v, the keys and values to append")

    def append(
        self,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        cu_seqlens_k_new: torch.Tensor | None,
        rotary_cos: torch.Tensor | None,
        rotary_sin: torch.Tensor | None,
        rotary_seqlens: torch.Tensor | None,
        *,
        rotary_interleaved: bool,
    ) -> None:
        """Rotate what is to be rotated, write ``k`` and ``v`` behind each sequence."""
        if k is None or v is None:
            raise InvalidInputError("k and v must be given together")
        require(self._has_lengths, "cache_seqlens is needed to append k and v")
        key, value, starts = self._new_rows(k, v, cu_seqlens_k_new)
        lengths = self._lengths + starts.diff()
        self._places.check(lengths, self._num_pages, self._leftpad)
        sequence = sequence_of_rows(starts, key.shape[0])
        nth = torch.arange(key.shape[0], device=self._device) - starts.long()[sequence]
        rotary = self._rotary(rotary_cos, rotary_sin, rotary_seqlens, rotary_interleaved)
        if rotary is not None:
            key = rotary.turn(key, sequence, nth)
            self.queries = _turned(self.queries, rotary, self._options)
        numbers = self._places.numbers(sequence, self._lengths.long()[sequence] + nth)
        if self._layer is not None:
            backend_for(self._device).store(self._layer, key, value, numbers)
        elif self._rows is not None:
            write_token_major(self._rows[0], key, numbers)
            write_token_major(self._rows[1], value, numbers)
        self._lengths = lengths

    def _new_rows(
        self, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dtypes = (self.queries.rows.dtype,)
        lead: tuple[int | None, ...] = (self._batch, None) if cu_seqlens is None else (None,)
        heads = self._num_heads
        check_tensor("k", k, (*lead, heads, self._head_dims[0]), dtypes, self._device)
        check_tensor("v", v, (*k.shape[:-1], self._head_dims[1]), dtypes, self._device)
        check_no_grad("k", k)
        check_no_grad("v", v)
        if cu_seqlens is None:
            starts = torch.arange(self._batch + 1, dtype=torch.int32, device=self._device)
            return k.flatten(0, 1), v.flatten(0, 1), starts * k.shape[1]
        check_cu_seqlens(
            "cu_seqlens_k_new", cu_seqlens, self._device, k.shape[0], None, self._batch
        )
        return k, v, cu_seqlens

    def _rotary(
        self,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        seqlens: torch.Tensor | None,
        interleaved: bool,
    ) -> Rotary | None:
        if cos is None and sin is None:
            require(seqlens is None, "rotary_seqlens needs rotary_cos and rotary_sin")
            return None
        if cos is None or sin is None:
            raise InvalidInputError("rotary_cos and rotary_sin must be given together")
        dtypes = (self.queries.rows.dtype, torch.float32)
        check_tensor("rotary_cos", cos, (None, None), dtypes, self._device)
        check_tensor("rotary_sin", sin, tuple(cos.shape), dtypes, self._device)
        turned, head_dim = 2 * cos.shape[1], self._head_dims[0]
        require(
            turned <= head_dim and turned % 16 == 0,
            f"rotary_cos has {cos.shape[1]} columns, which rotate {turned} elements; a multiple of "
            f"16 up to head_dim {head_dim} is needed",
        )
        if seqlens is not None:
            check_tensor("rotary_seqlens", seqlens, (self._batch,), INT32, self._device)
        return Rotary(cos, sin, self._lengths if seqlens is None else seqlens, interleaved)

    def keys(self) -> Keys:
        """Pages of all sequences, the appended tokens included."""
        # Lengths that the host could not check must not lead a kernel past the table.
        lengths = self._lengths.clamp(max=self._places.capacity)
        if self._layer is not None:
            return Keys(self._layer, self._places.table, lengths, self._head_dims[1])
        assert self._rows is not None
        token = torch.arange(self._places.capacity, device=self._device)[None, :]
        if self._leftpad is not None:
            lengths = (lengths - self._leftpad).clamp(min=0)
            token = token + self._leftpad.long()[:, None]
        sequence = torch.arange(self._batch, device=self._device)[:, None]
        return keys_from_rows(
            self._rows[0].flatten(0, 1),
            self._rows[1].flatten(0, 1),
            self._places.numbers(sequence, token),
            lengths,
            with_qv=self.queries.qv is not None,
            chunk=self._options.attention_chunk,
        )


def _queries(
    q: torch.Tensor,
    qv: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    max_seqlen_q: int | None,
) -> Queries:
    check_tensor(
        "q", q, (None,) * (4 if cu_seqlens_q is None else 3), (*QUERY_DTYPES, FP8), q.device
    )
    check_no_grad("q", q)
    if cu_seqlens_q is None:
        return Queries.from_batch(q, qv)
    check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q.device, q.shape[0], max_seqlen_q)
    assert max_seqlen_q is not None
    return Queries(q, qv, cu_seqlens_q, None, max_seqlen_q, False)


def _handle(
    k_cache: LayerCache,
    v_cache: torch.Tensor | LayerCache | None,
    queries: Queries,
    options: Options,
    leftpad: torch.Tensor | None,
) -> LayerCache:
    """Our own pages, and what they do not offer."""
    require(
        v_cache is None or v_cache is k_cache,
        "a LayerCache holds K and V; pass the same handle (or None) as v_cache",
    )
    size = k_cache.layout.page_size
    if options.attention_chunk % size:
        raise UnsupportedError(
            f"attention_chunk is {options.attention_chunk}; with a LayerCache it must be a "
            f"multiple of its page size {size}"
        )
    refused = {
        "qv": (queries.qv, "cache K and V as token-major tensors"),
        "cache_leftpad": (leftpad, "drop the leading pages from page_table"),
        "k_descale": (options.k_descale, "set k_scale in the handle"),
        "v_descale": (options.v_descale, "set v_scale in the handle"),
    }
    for name, (value, remedy) in refused.items():
        if value is not None:
            raise UnsupportedError(f"{name} is not available with a LayerCache; {remedy}")
    check_tensor(
        "q",
        queries.rows,
        (None, None, k_cache.layout.head_dim),
        QUERY_DTYPES,
        k_cache.device,
    )
    return k_cache


def _token_major(
    k_cache: torch.Tensor, v_cache: torch.Tensor | LayerCache | None, queries: Queries
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain tensors ``[first, second, Hk, D]``."""
    if not isinstance(v_cache, torch.Tensor):
        raise InvalidInputError("v_cache must be a tensor, as k_cache is")
    q = queries.rows
    check_tensor("k_cache", k_cache, (None, None, None, q.shape[-1]), (q.dtype,), q.device)
    check_tensor("v_cache", v_cache, (*k_cache.shape[:-1], None), (q.dtype,), q.device)
    if queries.qv is not None:
        if q.dtype == FP8:
            raise UnsupportedError("qv is not available with fp8 tensors; pass fp16 or bf16")
        check_tensor("qv", queries.qv, (*q.shape[:-1], v_cache.shape[-1]), (q.dtype,), q.device)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_no_grad(name, cache)
    return k_cache, v_cache


def _turned(queries: Queries, rotary: Rotary, options: Options) -> Queries:
    """Queries rotated at their positions; all at the first one where the mask is full."""
    sequence = queries.sequence_of_rows()
    # Padding rows past cu_seqlens_q[-1] belong to nobody; any position will do.
    sequence = sequence.clamp(max=max(0, queries.starts.shape[0] - 2))
    nth = torch.arange(queries.rows.shape[0], device=sequence.device)
    nth = nth - queries.starts.long()[sequence] if options.causal or options.is_local else nth * 0
    rows = rotary.turn(queries.rows, sequence, nth)
    return Queries(rows, queries.qv, queries.starts, queries.used, queries.longest, queries.padded)
