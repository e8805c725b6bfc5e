"""Refusals shared by the backends: what a tensor must look like, in terms of host facts only.

Nothing here reads a tensor's values, so that a CUDA backend can use it without waiting.
"""

from __future__ import annotations

import torch

from bicl.attention.metadata import AttentionMetadata
from bicl.attention.pool import LayerCache
from bicl.errors import InvalidInputError, UnsupportedError

__all__ = [
    "QUERY_DTYPES",
    "check_metadata",
    "check_page_lists",
    "check_query",
    "check_rows",
    "check_tensor",
]

QUERY_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """Raise ``InvalidInputError`` naming the tensor, what was expected and what came.

    ``None`` in ``shape`` allows any size.
    """
    got = tensor.shape
    fits = len(got) == len(shape)
    if fits:
        for want, have in zip(shape, got, strict=True):
            fits = fits and (want is None or want == have)
    if fits and tensor.dtype in dtypes and tensor.device == device:
        return
    if tensor.dtype not in dtypes:
        names = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise InvalidInputError(f"{name} must be {names}, got {tensor.dtype}")
    if not fits:
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise InvalidInputError(f"{name} must have shape [{sizes}], got {list(got)}")
    raise InvalidInputError(f"{name} must be on {device}, got {tensor.device}; move it there")


def check_no_grad(name: str, tensor: torch.Tensor) -> None:
    """The cache has no backward pass: a gradient that would be lost silently is refused."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise UnsupportedError(
            f"{name} requires a gradient, but attention over the cache has no backward pass; "
            "call it under torch.no_grad() or detach the tensor"
        )


def check_metadata(meta: AttentionMetadata, device: torch.device) -> None:
    """Shapes, dtypes and devices of one step's metadata."""
    batch, int32 = meta.cache_seqlens.shape[0] if meta.cache_seqlens.dim() else 0, (torch.int32,)
    check_tensor("cache_seqlens", meta.cache_seqlens, (None,), int32, device)
    if meta.page_table.dim() == 3:
        check_tensor("page_table", meta.page_table, (batch, None, None), int32, device)
        if meta.max_q > 1:
            raise InvalidInputError(
                f"page_table has a list a KV head, which only decode steps may have; max_q is "
                f"{meta.max_q}, give prefill steps one list a sequence"
            )
    else:
        check_tensor("page_table", meta.page_table, (batch, None), int32, device)
    check_tensor("cu_seqlens_q", meta.cu_seqlens_q, (batch + 1,), int32, device)
    check_tensor("slot_mapping", meta.slot_mapping, (None,), (torch.int64,), device)
    if meta.max_q < 0 or meta.max_k < 0:
        raise InvalidInputError(
            f"max_q and max_k must not be negative, got {meta.max_q} and {meta.max_k}"
        )


def check_rows(
    layer: LayerCache, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
) -> None:
    """K and V rows that are to be stored."""
    layout = layer.layout
    check_tensor("slots", slots, (None,), (torch.int64,), layer.device)
    shape = (slots.shape[0], layout.num_kv_heads, layout.head_dim)
    for name, rows in (("key", key), ("value", value)):
        check_tensor(name, rows, shape, QUERY_DTYPES, layer.device)
        check_no_grad(name, rows)


def check_query(
    layer: LayerCache,
    query: torch.Tensor,
    out: torch.Tensor | None,
    scale: float,
    softcap: float,
) -> None:
    """The query and the options of one call."""
    layout = layer.layout
    check_tensor("query", query, (None, None, layout.head_dim), QUERY_DTYPES, layer.device)
    check_no_grad("query", query)
    if query.shape[1] == 0 or query.shape[1] % layout.num_kv_heads:
        raise InvalidInputError(
            f"query has {query.shape[1]} heads; a positive multiple of the cache's "
            f"{layout.num_kv_heads} KV heads is needed"
        )
    if out is not None:
        check_tensor("out", out, tuple(query.shape), (query.dtype,), layer.device)
    if not 0.0 <= softcap < float("inf"):
        raise InvalidInputError(f"softcap is {softcap}; use 0 (off) or a positive number")
    if not 0.0 < scale < float("inf"):
        raise InvalidInputError(f"scale is {scale}; a positive finite number is needed")


def check_page_lists(layer: LayerCache, page_table: torch.Tensor, lengths: torch.Tensor) -> None:
    """A page table and the lengths that belong to it."""
    check_tensor("cache_seqlens", lengths, (None,), (torch.int32,), layer.device)
    check_tensor("page_table", page_table, (len(lengths), None), (torch.int32,), layer.device)
