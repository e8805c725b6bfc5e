"""FlashAttention 3 over paged KV.

``fa3-p64`` and ``fa3-p128`` call it as its README shows. ``-sched`` passes scheduler metadata that
was computed once for the step, which saves its small preparation kernel in every layer; the best
peer may be either.
"""

from __future__ import annotations

from functools import partial

import torch

from bench.kernels.arena import PagedBatch
from bench.kernels.impls import Contestant, Prepared, Registry
from bench.kernels.impls.token_major import key_value
from bench.kernels.shapes import HEAD_DIM

NAME = "fa3"


def register(registry: Registry) -> None:
    import flash_attn_3
    import flash_attn_interface  # noqa: F401  a failure here is the reason to be listed

    registry.versions[NAME] = str(getattr(flash_attn_3, "__version__", "unknown"))
    for target, run in ((registry.decode, _decode), (registry.prefill, _prefill)):
        target += [
            Contestant("fa3-p64", partial(run, 64, False)),
            Contestant("fa3-p64-sched", partial(run, 64, True)),
            Contestant("fa3-p128", partial(run, 128, False)),
            Contestant("fa3-p128-sched", partial(run, 128, True)),
        ]


def _decode(page_size: int, scheduled: bool, batch: PagedBatch) -> Prepared:
    # One query a sequence goes in unpacked: [batch, 1, heads, dim] is the path made for decode.
    return _prepare(page_size, scheduled, batch, batch.query.unsqueeze(1), {})


def _prefill(page_size: int, scheduled: bool, batch: PagedBatch) -> Prepared:
    packed = {"cu_seqlens_q": batch.cu_seqlens_q, "max_seqlen_q": max(batch.new_tokens)}
    return _prepare(page_size, scheduled, batch, batch.query, packed)


def _prepare(
    page_size: int,
    scheduled: bool,
    batch: PagedBatch,
    query: torch.Tensor,
    packed: dict,
) -> Prepared:
    import flash_attn_interface

    cache = batch.arena.token_major(batch.num_pages(page_size), page_size, batch.heads.kv)
    page_tables = batch.page_tables(page_size)
    if scheduled:
        packed = packed | {"scheduler_metadata": _metadata(page_size, batch, packed)}

    def call(table: torch.Tensor) -> torch.Tensor:
        out = flash_attn_interface.flash_attn_with_kvcache(
            query,
            *cache,
            cache_seqlens=batch.cache_seqlens,
            page_table=table,
            causal=True,
            **packed,
        )
        return out.view_as(batch.query)

    ids = torch.cat(
        [row[:count] for row, count in zip(page_tables[0], batch.pages(page_size), strict=True)]
    )
    calls = [partial(call, table) for table in page_tables]
    return Prepared(calls, key_value(batch, cache, ids, page_size), packed)


def _metadata(page_size: int, batch: PagedBatch, packed: dict) -> torch.Tensor:
    import flash_attn_interface

    return flash_attn_interface.get_scheduler_metadata(
        len(batch.lengths),
        max(batch.new_tokens),
        max(batch.lengths),
        batch.heads.query,
        batch.heads.kv,
        HEAD_DIM,
        batch.cache_seqlens,
        cu_seqlens_q=packed.get("cu_seqlens_q"),
        page_size=page_size,
        causal=True,
    )
