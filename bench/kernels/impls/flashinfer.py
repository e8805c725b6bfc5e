"""FlashInfer, as text-generation-inference calls it and at its best.

``flashinfer-p1`` is TGI's default: one token a page, CUDA cores for group sizes 1, 2, 4 and 8,
planned for CUDA graphs. ``-tc`` turns on tensor cores, ``-batch`` is the persistent kernel for
mixed batches. Plans are made outside the timed region; only ``run`` is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch

from bench.kernels.arena import PagedBatch
from bench.kernels.impls import Contestant, Prepared, Registry
from bench.kernels.impls.token_major import key_value
from bench.kernels.shapes import HEAD_DIM

NAME = "flashinfer"
_WORKSPACE_BYTES = 3 << 30
_BF16 = torch.bfloat16


def register(registry: Registry) -> None:
    import flashinfer

    registry.versions[NAME] = flashinfer.__version__
    registry.decode += [
        Contestant("flashinfer-p1", partial(_decode, 1, False)),
        Contestant("flashinfer-p1-tc", partial(_decode, 1, True)),
        Contestant("flashinfer-p64-tc", partial(_decode, 64, True)),
        Contestant("flashinfer-batch", partial(_persistent, 64)),
        Contestant("flashinfer-batch-p1", partial(_persistent, 1)),
    ]
    registry.layer.append(Contestant("flashinfer-p1", _layer))
    registry.launch["flashinfer-p1"] = lambda batch: _decode(1, False, batch).calls[0]
    registry.plan["flashinfer-p1"] = _plan
    registry.prefill += [
        Contestant("flashinfer-p1", partial(_prefill, 1)),
        Contestant("flashinfer-p64", partial(_prefill, 64)),
    ]


@cache
def _workspace(device: torch.device) -> torch.Tensor:
    """Scratch for partial results, shared: contestants run one after another on one stream."""
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _decode(page_size: int, tensor_cores: bool, batch: PagedBatch) -> Prepared:
    import flashinfer

    pages = batch.arena.token_major(batch.num_pages(page_size), page_size, batch.heads.kv)
    page_ids = batch.page_ids(page_size)
    indptr, last = batch.page_indptr(page_size), batch.last_page_len(page_size)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        _workspace(batch.arena.device),
        "NHD",
        use_cuda_graph=True,
        use_tensor_cores=tensor_cores,
        paged_kv_indptr_buffer=indptr.clone(),
        paged_kv_indices_buffer=page_ids[0].clone(),
        paged_kv_last_page_len_buffer=last.clone(),
    )
    plan = partial(
        wrapper.plan,
        indptr,
        page_ids[0],
        last,
        batch.heads.query,
        batch.heads.kv,
        HEAD_DIM,
        page_size,
        q_data_type=_BF16,
        kv_data_type=_BF16,
    )
    plan()
    out = torch.empty_like(batch.query)

    def call(ids: torch.Tensor) -> torch.Tensor:
        # The plan depends on the lengths only; another set of pages is another index buffer.
        wrapper._paged_kv_indices_buf = ids
        return wrapper.run(batch.query, pages, out=out)

    calls = [partial(call, ids) for ids in page_ids]
    return Prepared(calls, key_value(batch, pages, page_ids[0], page_size), plan)


def _plan(batch: PagedBatch) -> Callable[[], object]:
    """TGI plans once a step; part of it waits for the device."""
    return _decode(1, False, batch).keep


def _layer(batch: PagedBatch) -> Prepared:
    """As TGI does: two index_put kernels, then attention."""
    prepared = _decode(1, False, batch)
    key_pages, value_pages = batch.arena.token_major(batch.num_pages(1), 1, batch.heads.kv)
    new = torch.randn_like(key_pages[: len(batch.lengths), 0])
    slots = torch.randperm(key_pages.shape[0], device=new.device)[: len(batch.lengths)]

    def call(attend: Callable[[], torch.Tensor]) -> torch.Tensor:
        key_pages[:, 0][slots] = new
        value_pages[:, 0][slots] = new
        return attend()

    calls = [partial(call, attend) for attend in prepared.calls]
    return Prepared(calls, prepared.key_value, prepared)


def _persistent(page_size: int, batch: PagedBatch) -> Prepared:
    import flashinfer

    pages = batch.arena.token_major(batch.num_pages(page_size), page_size, batch.heads.kv)
    page_ids = batch.page_ids(page_size)
    wrapper = flashinfer.BatchAttention("NHD")
    # Its own 384 MB overflow at 32 KV heads; a larger buffer lets it run there.
    wrapper.float_workspace_buffer = _workspace(batch.arena.device)
    wrapper.plan(
        batch.cu_seqlens_q,
        batch.page_indptr(page_size),
        page_ids[0],
        batch.cache_seqlens,
        batch.heads.query,
        batch.heads.kv,
        HEAD_DIM,
        HEAD_DIM,
        page_size,
        causal=True,
        q_data_type=_BF16,
        kv_data_type=_BF16,
    )
    out = torch.empty_like(batch.query)
    lse = torch.empty(batch.query.shape[:2], device=batch.arena.device)

    def call(ids: torch.Tensor) -> torch.Tensor:
        wrapper._kv_indices = ids
        wrapper.run(batch.query, pages, out=out, lse=lse)
        return out

    calls = [partial(call, ids) for ids in page_ids]
    return Prepared(calls, key_value(batch, pages, page_ids[0], page_size), wrapper)


def _prefill(page_size: int, batch: PagedBatch) -> Prepared:
    import flashinfer

    pages = batch.arena.token_major(batch.num_pages(page_size), page_size, batch.heads.kv)
    page_ids = batch.page_ids(page_size)
    # "auto" chooses the same kernel on this card; named so that it stays the same.
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        _workspace(batch.arena.device), "NHD", backend="fa3"
    )
    wrapper.plan(
        batch.cu_seqlens_q,
        batch.page_indptr(page_size),
        page_ids[0],
        batch.last_page_len(page_size),
        batch.heads.query,
        batch.heads.kv,
        HEAD_DIM,
        page_size,
        causal=True,
        q_data_type=_BF16,
        kv_data_type=_BF16,
    )
    out = torch.empty_like(batch.query)

    def call(ids: torch.Tensor) -> torch.Tensor:
        wrapper._paged_kv_indices_buf = ids
        return wrapper.run(batch.query, pages, out=out)

    calls = [partial(call, ids) for ids in page_ids]
    return Prepared(calls, key_value(batch, pages, page_ids[0], page_size), wrapper)
