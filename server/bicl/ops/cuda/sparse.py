"""Which pages a decode step reads. ``ops/cpu/sparse.py`` has the same signatures."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from bicl.errors import UnsupportedError
from bicl.ops.cuda import library

if TYPE_CHECKING:
    from bicl.attention.pool import LayerCache
    from bicl.sparse.index import LayerIndex
    from bicl.sparse.selection import SelectionRule

__all__ = [
    "check_index",
    "choose_tiles",
    "index_pages",
    "score_tiles",
    "select_tiles",
    "store_and_index",
]

# CTAs that share a sequence's pages, and so the order of sums, otherwise depend on the batch.
DETERMINISTIC_CLUSTER = 8

MAX_HEAD_DIM = 256
_COMBINES = {"max": 0, "sum": 1, "softmax": 2}


def check_index(index: LayerIndex) -> None:
    """Refuse at start what the kernels do not read.

    Raises:
        UnsupportedError: naming what is not read and the remedy.
    """
    if index.kind != "centroids":
        raise UnsupportedError(
            f"the CUDA kernels read indexes of kind 'centroids', not {index.kind!r}; "
            "use --hysparse-variant centroids, or device 'cpu'"
        )
    if index.dtype not in (torch.float16, torch.bfloat16):
        raise UnsupportedError(
            f"HySparse on CUDA runs models of float16 or bfloat16, not {index.dtype}; "
            "load the model in bfloat16"
        )
    head_dim = index.layer.layout.head_dim
    if head_dim % 8 or head_dim > MAX_HEAD_DIM:
        raise UnsupportedError(
            f"HySparse on CUDA needs a head_dim that is a multiple of 8 up to {MAX_HEAD_DIM}, got "
            f"{head_dim}; start without --enable-hysparse"
        )


def index_pages(layer: LayerCache, index: LayerIndex, slots: torch.Tensor) -> None:
    """Rewrites the index of every page whose last slot is in ``slots``.

    Args:
        layer: the pages, with the keys of ``slots`` stored.
        slots: int64 ``[T]``; negative: skip.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; the message names them.
    """
    library.module().index_pages(
        layer.pages,
        index.vectors,
        slots,
        layer.layout.page_size,
        layer.layout.head_dim,
        layer.k_scale,
        True,
    )


def store_and_index(
    layer: LayerCache,
    records: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    *,
    choice_follows: bool = False,
    pdl: bool = False,
) -> None:
    """``store_kv`` and ``index_pages`` in one launch, for steps of one token a sequence.

    Args:
        records: uint8 ``[num_pages, n]``, a ``centroids`` index's.
        key, value: ``[B, H, head_dim]``, float16 or bfloat16.
        choice_follows: the next launch is :func:`choose_tiles` with ``after_store``, which may
            then start before the kernel ahead of this one has ended.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; the message names them.
    """
    library.module().store_and_index(
        key,
        value,
        layer.pages,
        records,
        slots,
        layer.layout.page_size,
        layer.k_scale,
        layer.v_scale,
        pdl,
        choice_follows,
    )


def score_tiles(
    query: torch.Tensor,
    layer: LayerCache,
    index: LayerIndex,
    page_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Estimates, for every query head, how much attention a page draws.

    Args:
        query: ``[B, num_q_heads, head_dim]``, float16 or bfloat16.
        page_table: int32 ``[B, max_pages]``; cache_seqlens: int32 ``[B]``.
        scale: of the attention scores.

    Returns:
        float32 ``[B, num_q_heads, max_pages]``, natural-log units. What stands at a sequence's
        last page, or past it, means nothing.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; the message names them.
    """
    shape = (query.shape[0], query.shape[1], page_table.shape[1])
    scores = torch.empty(shape, dtype=torch.float32, device=query.device)
    library.module().score_tiles(
        scores,
        _aligned(query),
        index.vectors,
        index.weights,
        page_table,
        cache_seqlens,
        layer.layout.num_kv_heads,
        layer.layout.page_size,
        scale,
        True,
    )
    return scores


def select_tiles(
    scores: torch.Tensor,
    page_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    sparsity: torch.Tensor,
    rule: SelectionRule,
    num_kv_heads: int,
    combine: str = "softmax",
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The pages that each KV head reads: first and recent ones, and the best of the rest.

    Of equal scores the earlier page wins.

    Args:
        scores: as ``score_tiles`` returns them.
        sparsity: float32 ``[B]``, the share to leave out; 0 keeps a row whole.
        combine: how the query heads of a KV head agree: ``softmax``, ``sum`` or ``max``.
        positions: int32 ``[B, H, max_pages]``, filled with where the pages stand, if given.

    Returns:
        Page ids int32 ``[B, H, max_pages]``, ascending in position, and how many tokens they hold,
        int32 ``[B]``. Entries past them are unset.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; the message names them.
    """
    selected, lengths = _outputs(num_kv_heads, page_table)
    library.module().select_tiles(
        selected,
        lengths,
        positions,
        scores,
        page_table,
        cache_seqlens,
        sparsity,
        rule.page_size,
        rule.max_k,
        rule.first,
        rule.recent,
        rule.floor,
        _COMBINES[combine],
        True,
    )
    return selected, lengths


def choose_tiles(
    query: torch.Tensor,
    layer: LayerCache,
    index: LayerIndex,
    page_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    sparsity: torch.Tensor,
    rule: SelectionRule,
    combine: str,
    *,
    scale: float,
    positions: torch.Tensor | None = None,
    after_store: bool = False,
    deterministic: bool = False,
    force_cluster: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``score_tiles`` and ``select_tiles``; on Hopper in one launch, without scores in memory.

    Args:
        after_store: the kernel ahead is this step's :func:`store_and_index` of this layer: lengths,
            the page table and the index of old pages are read while it, and with
            ``choice_follows`` also the kernel ahead of it, still runs.
        deterministic: the choice for a sequence depends on nothing but itself.
        force_cluster: tests and benchmarks.
    """
    num_kv_heads = layer.layout.num_kv_heads
    if not (force_cluster or _has_clusters(query.device)):
        scores = score_tiles(query, layer, index, page_table, cache_seqlens, scale)
        place = (page_table, cache_seqlens, sparsity * index.share)
        return select_tiles(scores, *place, rule, num_kv_heads, combine, positions)
    selected, lengths = _outputs(num_kv_heads, page_table)
    library.module().choose_tiles(
        selected,
        lengths,
        positions,
        _aligned(query),
        index.vectors,
        index.weights,
        page_table,
        cache_seqlens,
        sparsity,
        index.share,
        rule.page_size,
        rule.max_k,
        rule.first,
        rule.recent,
        rule.floor,
        _COMBINES[combine],
        scale,
        1 if after_store else 2,
        DETERMINISTIC_CLUSTER if deterministic and not force_cluster else force_cluster,
    )
    return selected, lengths


@functools.cache
def _has_clusters(device: torch.device) -> bool:
    """Elsewhere one CTA a KV head would read the index alone."""
    return torch.cuda.get_device_capability(device)[0] == 9


def _outputs(num_kv_heads: int, page_table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    batch, width = page_table.shape
    selected = torch.empty(
        (batch, num_kv_heads, width), dtype=torch.int32, device=page_table.device
    )
    return selected, torch.empty(batch, dtype=torch.int32, device=page_table.device)


def _aligned(query: torch.Tensor) -> torch.Tensor:
    """Rows that start at 16 bytes, as the kernels read them."""
    stride = query.stride()
    fits = stride[-1] == 1 and (query.data_ptr() | stride[0] * 2 | stride[1] * 2) % 16 == 0
    return query if fits else query.contiguous()
