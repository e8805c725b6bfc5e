"""The cache as a device under FlashAttention's functions: any keys, one backend call.

``flash_attn_interface`` holds the public signatures; here their arguments become query rows,
pages and lengths. Token-major tensors are laid into pages first, so that a device only needs an
``AttentionBackend``. No length is read on the host unless it lies there already (CPU).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.nn import functional as F

from bicl.attention.backend import AttentionBackend, make_backend
from bicl.attention.metadata import AttentionMetadata
from bicl.attention.pool import LayerCache
from bicl.attention.virtual_device.spans import Spans, cut_spans
from bicl.attention.virtual_device.token_major import lay_into_pages
from bicl.errors import InvalidInputError

__all__ = [
    "FP8",
    "Keys",
    "Options",
    "Queries",
    "Result",
    "attend",
    "backend_for",
    "keys_from_rows",
    "sequence_of_rows",
]

FP8 = torch.float8_e4m3fn
Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@lru_cache(maxsize=16)
def backend_for(device: torch.device) -> AttentionBackend:
    """The backend of a device, made on first use; the only choice of backend in the interface."""
    return make_backend(device)


@dataclass(frozen=True)
class Options:
    """What a call asks of every row, named as in the interface."""

    softmax_scale: float | None
    causal: bool
    window_size: tuple[int, int]
    attention_chunk: int
    softcap: float
    q_descale: torch.Tensor | None = None
    k_descale: torch.Tensor | None = None
    v_descale: torch.Tensor | None = None

    @property
    def is_local(self) -> bool:
        return self.attention_chunk > 0 or any(int(side) >= 0 for side in self.window_size)


@dataclass(frozen=True)
class Queries:
    """Packed query rows.

    Attributes:
        rows: ``[T, Hq, D]``.
        qv: ``[T, Hq, Dv]`` or None.
        starts: int32 ``[B + 1]``.
        used: int32 ``[B]``, rows that count; None: all.
        longest: host bound of the query lengths.
        padded: whether rows came as ``[B, Sq]`` and results go back in that shape.
    """

    rows: torch.Tensor
    qv: torch.Tensor | None
    starts: torch.Tensor
    used: torch.Tensor | None
    longest: int
    padded: bool

    @classmethod
    def from_batch(cls, q: torch.Tensor, qv: torch.Tensor | None) -> Queries:
        """From ``[B, Sq, Hq, D]``."""
        batch, length = q.shape[:2]
        starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * length
        flat = None if qv is None else qv.flatten(0, 1)
        return cls(q.flatten(0, 1), flat, starts, None, length, True)

    def sequence_of_rows(self) -> torch.Tensor:
        """int64 ``[T]``."""
        return sequence_of_rows(self.starts, self.rows.shape[0])


@dataclass(frozen=True)
class Keys:
    """Pages to attend to.

    Attributes:
        table: int32 ``[B, columns]``; with ``attention_chunk`` every chunk begins on a column.
        lengths: int32 ``[B]``.
        value_dim: elements of a value row; the rest of a page's row is padding.
    """

    layer: LayerCache
    table: torch.Tensor
    lengths: torch.Tensor
    value_dim: int

    @property
    def max_tokens(self) -> int:
        return self.table.shape[1] * self.layer.layout.page_size


def sequence_of_rows(starts: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Which sequence owns each packed row, int64 ``[num_rows]``."""
    rows = torch.arange(num_rows, dtype=starts.dtype, device=starts.device)
    return torch.bucketize(rows, starts[1:], right=True)


def keys_from_rows(
    key: torch.Tensor,
    value: torch.Tensor,
    row_numbers: torch.Tensor,
    lengths: torch.Tensor,
    *,
    with_qv: bool,
    chunk: int,
) -> Keys:
    """Token-major keys, laid into pages for this call.

    Args:
        key, value: ``[rows, Hk, D]`` and ``[rows, Hk, Dv]``.
        row_numbers: int64 ``[B, tokens]``.
        lengths: int32 ``[B]``, of ``tokens`` those that count.
        with_qv: scores also take ``qv . v``: keys carry a copy of their value.
        chunk: ``attention_chunk``.
    """
    value_dim = value.shape[-1]
    if with_qv:
        key = torch.cat((key, value), dim=-1)
    dtype = torch.bfloat16 if key.dtype == FP8 else key.dtype
    if lengths.device.type == "cpu" and lengths.numel():
        row_numbers = row_numbers[:, : int(lengths.max())]
    backend = backend_for(key.device)
    layer, table = lay_into_pages(backend, key, value, row_numbers, dtype, chunk)
    return Keys(layer, table, lengths, value_dim)


def attend(queries: Queries, keys: Keys, options: Options, return_lse: bool) -> Result:
    """Run one step and give the result the shape of the queries."""
    chunk = options.attention_chunk
    spans = cut_spans(queries.starts, queries.used, keys.lengths, chunk, keys.max_tokens)
    table = _table_of_spans(keys, spans, chunk)
    meta = AttentionMetadata(
        page_table=table,
        cache_seqlens=spans.keys,
        cu_seqlens_q=spans.cu_seqlens_q,
        slot_mapping=spans.chunk.new_empty(0),
        max_q=queries.longest,
        max_k=table.shape[1] * keys.layer.layout.page_size,
        causal=options.causal,
    )
    backend = backend_for(queries.rows.device)
    backend.plan(meta)
    result = backend.run(
        _query_rows(queries, keys, options),
        keys.layer,
        meta,
        scale=_scale(queries, options),
        window_left=int(options.window_size[0]),
        window_right=int(options.window_size[1]),
        softcap=options.softcap,
        return_lse=return_lse,
    )
    out, lse = result if isinstance(result, tuple) else (result, None)
    out = _rescale_values(out[..., : keys.value_dim], queries, options)
    if queries.padded:
        batch = queries.starts.shape[0] - 1
        out = out.reshape(batch, queries.longest, *out.shape[1:])
        if lse is not None:
            lse = lse.view(lse.shape[0], batch, queries.longest).transpose(0, 1)
    out = out.contiguous()
    return out if lse is None else (out, lse.contiguous())


def _table_of_spans(keys: Keys, spans: Spans, chunk: int) -> torch.Tensor:
    if len(spans.chunk) == 1:
        return keys.table
    if chunk == 0:
        return keys.table.repeat_interleave(len(spans.chunk), dim=0)
    pages = min(-(-chunk // keys.layer.layout.page_size), keys.table.shape[1])
    columns = spans.chunk.clamp(min=0)[:, None] * pages
    columns = columns + torch.arange(pages, device=columns.device)
    picked = keys.table[:, columns.clamp(max=keys.table.shape[1] - 1)]
    return picked.reshape(-1, pages).contiguous()


def _scale(queries: Queries, options: Options) -> float:
    if options.softmax_scale is not None:
        return float(options.softmax_scale)
    extra = 0 if queries.qv is None else queries.qv.shape[-1]
    return float((queries.rows.shape[-1] + extra) ** -0.5)


def _query_rows(queries: Queries, keys: Keys, options: Options) -> torch.Tensor:
    """Query rows as the pages need them: as wide as a page's row, fp8 scales multiplied in."""
    rows = queries.rows
    if queries.qv is not None:
        rows = torch.cat((rows, queries.qv), dim=-1)
    if rows.dtype == FP8:
        rows = rows.float()
        for descale in (options.q_descale, options.k_descale):
            if descale is not None:
                rows = _times_descale(rows, descale, queries)
        rows = rows.to(torch.bfloat16)
    return F.pad(rows, (0, keys.layer.layout.head_dim - rows.shape[-1]))


def _rescale_values(out: torch.Tensor, queries: Queries, options: Options) -> torch.Tensor:
    if queries.rows.dtype != FP8 or options.v_descale is None:
        return out
    return _times_descale(out.float(), options.v_descale, queries).to(out.dtype)


def _times_descale(rows: torch.Tensor, descale: torch.Tensor, queries: Queries) -> torch.Tensor:
    """Rows ``[T, Hq, D]`` times ``[B, Hk]``, each KV head's factor for its query heads."""
    batch = queries.starts.shape[0] - 1
    if descale.dim() != 2 or descale.shape[0] != batch or rows.shape[1] % descale.shape[1]:
        raise InvalidInputError(
            f"descale factors must have shape [{batch}, num_kv_heads], got {list(descale.shape)}"
        )
    factor = descale.float().repeat_interleave(rows.shape[1] // descale.shape[1], dim=1)
    return rows * factor.index_select(0, queries.sequence_of_rows())[..., None]
