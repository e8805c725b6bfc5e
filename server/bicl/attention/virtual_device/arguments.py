"""Checks of FlashAttention's arguments, by their names there."""

from __future__ import annotations

import torch

from bicl.attention.pool import LayerCache
from bicl.attention.validate import QUERY_DTYPES, check_no_grad, check_tensor
from bicl.attention.virtual_device.core import FP8, Options
from bicl.errors import InvalidInputError, UnsupportedError

__all__ = ["check_cu_seqlens", "check_options", "check_qkv", "check_used", "require", "split_qkv"]

INT32 = (torch.int32,)
MAX_SPLITS = 256


def require(condition: bool, message: str) -> None:
    """Raise ``InvalidInputError`` with ``message`` unless ``condition``."""
    if not condition:
        raise InvalidInputError(message)


def check_options(
    options: Options, num_splits: int, scheduler_metadata: torch.Tensor | None = None
) -> None:
    """Values that need no tensor."""
    if scheduler_metadata is not None:
        raise UnsupportedError(
            "scheduler_metadata belongs to FlashAttention's kernels; pass None, the backend "
            "schedules by itself"
        )
    require(
        0 <= num_splits <= MAX_SPLITS,
        f"num_splits is {num_splits}; use 0 (automatic) to {MAX_SPLITS}",
    )
    require(
        len(options.window_size) == 2,
        f"window_size must be (left, right), got {options.window_size}",
    )
    require(
        options.attention_chunk >= 0,
        f"attention_chunk is {options.attention_chunk}; use 0 (off) or a number of tokens",
    )


def check_qkv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qv: torch.Tensor | None,
    *,
    query_dims: int,
    key_dims: int,
) -> None:
    """Query against keys and values ``[..., heads, head_dim]``."""
    if isinstance(k, LayerCache) or isinstance(v, LayerCache):
        raise UnsupportedError(
            "a LayerCache is read through its page_table; call flash_attn_with_kvcache (for "
            "sequences of varying length with cu_seqlens_q and cache_seqlens)"
        )
    require(q.dim() == query_dims, f"q must have {query_dims} dims, got shape {list(q.shape)}")
    dtypes = (*QUERY_DTYPES, FP8)
    check_tensor("q", q, (None,) * query_dims, dtypes, q.device)
    check_tensor("k", k, (None,) * key_dims, (q.dtype,), q.device)
    check_tensor("k", k, (*(None,) * (key_dims - 1), q.shape[-1]), (q.dtype,), q.device)
    check_tensor("v", v, (*k.shape[:-1], None), (q.dtype,), q.device)
    if query_dims == 4 and key_dims == 4:
        check_tensor("k", k, (q.shape[0], *(None,) * 3), (q.dtype,), q.device)
    if qv is not None:
        check_tensor("qv", qv, (*q.shape[:-1], v.shape[-1]), (q.dtype,), q.device)
        if q.dtype == FP8:
            raise UnsupportedError("qv is not available with fp8 tensors; pass fp16 or bf16")
    check_groups(q.shape[-2], k.shape[-2])
    for name, tensor in (("q", q), ("k", k), ("v", v), ("qv", qv)):
        if tensor is not None:
            check_no_grad(name, tensor)


def check_groups(num_heads_q: int, num_heads_k: int) -> None:
    """Query heads per KV head must be a whole number."""
    require(
        num_heads_k > 0 and num_heads_q % num_heads_k == 0,
        f"q has {num_heads_q} heads; a multiple of the {num_heads_k} heads of k is needed",
    )


def check_cu_seqlens(
    name: str,
    cu_seqlens: torch.Tensor,
    device: torch.device,
    num_rows: int,
    longest: int | None,
    batch: int | None = None,
) -> None:
    """Running sums ``[B + 1]``; their values only where they lie on the host."""
    bound = {"cu_seqlens_q": "max_seqlen_q", "cu_seqlens_k": "max_seqlen_k"}.get(name, "")
    require(longest is not None or not bound, f"{bound} is needed with {name}")
    check_tensor(name, cu_seqlens, (None if batch is None else batch + 1,), INT32, device)
    require(cu_seqlens.shape[0] > 0, f"{name} must have at least one entry, 0")
    if device.type != "cpu":
        return
    lengths = cu_seqlens.diff()
    low = int(lengths.min()) if lengths.numel() else 0
    high = int(lengths.max()) if lengths.numel() else 0
    require(
        int(cu_seqlens[0]) == 0 and low >= 0 and int(cu_seqlens[-1]) <= num_rows,
        f"{name} must rise from 0 to at most {num_rows}, the rows given; got {cu_seqlens.tolist()}",
    )
    if longest is not None:
        require(high <= longest, f"{bound} is {longest}, but a sequence of {name} has {high}")


def check_used(name: str, used: torch.Tensor | None, lengths: torch.Tensor) -> None:
    """Used lengths ``[B]``, none above the real length."""
    if used is None:
        return
    check_tensor(name, used, tuple(lengths.shape), INT32, lengths.device)
    if used.device.type == "cpu" and used.numel():
        require(
            bool((used >= 0).all() and (used <= lengths).all()),
            f"{name} must lie between 0 and the sequence lengths {lengths.tolist()}, got "
            f"{used.tolist()}",
        )


def split_qkv(
    qkv: torch.Tensor, num_heads_q: int | None, leading: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of Q, K and V in ``[..., 3, H, D]`` or ``[..., num_heads_q + 2 * num_heads_k, D]``.

    ``leading``: dims before those.
    """
    if qkv.dim() == leading + 3:
        require(qkv.shape[-3] == 3, f"qkv must be [..., 3, heads, head_dim], got {list(qkv.shape)}")
        q, k, v = qkv.unbind(dim=-3)
        return q, k, v
    require(
        qkv.dim() == leading + 2,
        f"qkv must have {leading + 3} dims, or {leading + 2} with num_heads_q; got shape "
        f"{list(qkv.shape)}",
    )
    if num_heads_q is None:
        raise InvalidInputError(f"num_heads_q is needed for qkv of shape {list(qkv.shape)}")
    rest = qkv.shape[-2] - num_heads_q
    require(
        num_heads_q > 0 and rest > 0 and rest % 2 == 0,
        f"qkv has {qkv.shape[-2]} heads; that leaves no equal numbers for K and V after "
        f"num_heads_q = {num_heads_q}",
    )
    ends = (num_heads_q, num_heads_q + rest // 2)
    q, k, v = torch.tensor_split(qkv, ends, dim=-2)
    return q, k, v
