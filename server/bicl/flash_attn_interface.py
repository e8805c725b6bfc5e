"""FlashAttention 3's Python interface over BICL pages: the cache as a virtual device.

Names, argument order, defaults and shape rules are those of ``hopper/flash_attn_interface.py``
(FlashAttention 3; ``flash_attn_varlen_qkvpacked_func`` has the name and the leading arguments of
FlashAttention 2, the rest in the order of version 3). Code written for it runs unchanged, on any
device that has a backend. What differs:

* ``k_cache`` may be a ``LayerCache``, our own pages, with the same handle (or None) as ``v_cache``
  and page ids of the pool in ``page_table``. Nothing is copied then. Token-major tensors, padded
  or paged with any page size, work too; they are laid into pages at every call.
* A row that sees no key is exactly 0 and its LSE is -inf, rows past ``seqused_q`` included.
* There is no backward pass: an input that requires a gradient raises ``UnsupportedError`` unless
  gradients are off (``torch.no_grad``).
* With ``return_attn_probs`` or ``return_softmax_lse`` the result is ``(out, lse)``, never longer.
* float32 is accepted where the backend can compute it (CPU).
* ``num_splits``, ``pack_gqa``, ``sm_margin`` and ``deterministic`` tune FlashAttention's schedule
  and never change what is computed; here the backend schedules by itself and they have no effect.
  ``scheduler_metadata`` is refused, since it belongs to FlashAttention's own kernels.
* ``q_descale``, ``k_descale`` and ``v_descale`` are read for fp8 tensors only, as in version 3. The
  scales of an fp8 ``LayerCache`` are in the handle.

Lengths are checked against the cache on the CPU. On a GPU nothing waits for the device: there an
append past the end of ``page_table`` writes nothing.
"""

from __future__ import annotations

import torch

from bicl.attention.pool import LayerCache
from bicl.attention.virtual_device.arguments import (
    check_cu_seqlens,
    check_options,
    check_qkv,
    check_used,
    split_qkv,
)
from bicl.attention.virtual_device.core import Options, Queries, Result, attend, keys_from_rows
from bicl.attention.virtual_device.kvcache import KVCacheCall

__all__ = [
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

Descale = torch.Tensor | None


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Descale = None,
    k_descale: Descale = None,
    v_descale: Descale = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """Attention over packed Q, K and V; see ``flash_attn_func``.

    Args:
        qkv: ``[B, S, 3, H, D]``, or ``[B, S, num_heads_q + 2 * num_heads_k, D]`` with
            ``num_heads_q`` given.
    """
    q, k, v = split_qkv(qkv, num_heads_q, leading=2)
    return flash_attn_func(
        q,
        k,
        v,
        softmax_scale,
        causal,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        deterministic=deterministic,
        sm_margin=sm_margin,
        return_attn_probs=return_attn_probs,
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Descale = None,
    k_descale: Descale = None,
    v_descale: Descale = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """Attention over packed Q, K and V of varying length; see ``flash_attn_varlen_func``.

    Args:
        qkv: ``[total, 3, H, D]``, or ``[total, num_heads_q + 2 * num_heads_k, D]`` with
            ``num_heads_q`` given.
        cu_seqlens: int32 ``[B + 1]``.
        max_seqlen: longest sequence.
    """
    q, k, v = split_qkv(qkv, num_heads_q, leading=1)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        softmax_scale=softmax_scale,
        causal=causal,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        deterministic=deterministic,
        sm_margin=sm_margin,
        return_attn_probs=return_attn_probs,
    )


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: Descale = None,
    k_descale: Descale = None,
    v_descale: Descale = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """Attention over a padded batch.

    With ``causal`` the mask is aligned to the bottom right corner: query ``i`` of ``Sq`` sees keys
    up to ``i + Sk - Sq``. A window ``(left, right)`` keeps, both ends included, ``left`` keys
    before and ``right`` keys after that position; -1 is unlimited.

    Args:
        q: ``[B, Sq, Hq, D]``, fp32, fp16, bf16 or fp8 e4m3.
        k: ``[B, Sk, Hk, D]``; ``Hk`` divides ``Hq``.
        v: ``[B, Sk, Hk, Dv]``.
        softmax_scale: default ``1 / sqrt(D)``, with ``qv`` ``1 / sqrt(D + Dv)``.
        qv: ``[B, Sq, Hq, Dv]``; adds ``qv . v`` to the scores.
        q_descale, k_descale, v_descale: float32 ``[B, Hk]``, multiply fp8 values.
        attention_chunk: each query sees only the keys of its own chunk of so many positions;
            0 is off.
        softcap: scores become ``softcap * tanh(score / softcap)``; 0 is off.

    Returns:
        ``[B, Sq, Hq, Dv]`` in q's dtype (bf16 for fp8); with ``return_attn_probs`` also the LSE,
        float32 ``[B, Hq, Sq]``.

    Raises:
        InvalidInputError: a shape, dtype, device or value; the message names the argument.
        UnsupportedError: an input requires a gradient.
    """
    options = Options(
        softmax_scale,
        causal,
        window_size,
        attention_chunk,
        softcap,
        q_descale,
        k_descale,
        v_descale,
    )
    check_options(options, num_splits)
    check_qkv(q, k, v, qv, query_dims=4, key_dims=4)
    batch, seqlen_k = k.shape[:2]
    keys = keys_from_rows(
        k.flatten(0, 1),
        v.flatten(0, 1),
        torch.arange(batch * seqlen_k, device=k.device).view(batch, seqlen_k),
        torch.full((batch,), seqlen_k, dtype=torch.int32, device=k.device),
        with_qv=qv is not None,
        chunk=attention_chunk,
    )
    return attend(Queries.from_batch(q, qv), keys, options, return_attn_probs)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: Descale = None,
    k_descale: Descale = None,
    v_descale: Descale = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """Attention over packed sequences of varying length; mask and options as ``flash_attn_func``.

    Pages take no ``cu_seqlens_k``: for a ``LayerCache`` or a paged tensor call
    ``flash_attn_with_kvcache`` with ``cu_seqlens_q``, ``max_seqlen_q``, ``page_table`` and
    ``cache_seqlens = cu_seqlens_k.diff()``.

    Args:
        q: ``[total_q, Hq, D]``.
        k: ``[total_k, Hk, D]``, or ``[B, Sk, Hk, D]`` with ``cu_seqlens_k`` None.
        v: ``[total_k, Hk, Dv]`` or ``[B, Sk, Hk, Dv]``.
        cu_seqlens_q, cu_seqlens_k: int32 ``[B + 1]``, running sums from 0. Sequences may be empty.
        max_seqlen_q, max_seqlen_k: bounds of the lengths.
        seqused_q, seqused_k: int32 ``[B]``; only so many rows, counted from the start of each
            sequence, are used. Unused query rows become zero.

    Returns:
        ``[total_q, Hq, Dv]``; with ``return_attn_probs`` also the LSE, float32 ``[Hq, total_q]``.

    Raises:
        InvalidInputError: a shape, dtype, device or value; the message names the argument.
        UnsupportedError: an input requires a gradient, or k is a ``LayerCache``.
    """
    options = Options(
        softmax_scale,
        causal,
        window_size,
        attention_chunk,
        softcap,
        q_descale,
        k_descale,
        v_descale,
    )
    check_options(options, num_splits)
    check_qkv(q, k, v, qv, query_dims=3, key_dims=4 if cu_seqlens_k is None else 3)
    check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q.device, q.shape[0], max_seqlen_q)
    batch = cu_seqlens_q.shape[0] - 1
    check_used("seqused_q", seqused_q, cu_seqlens_q.diff())
    if cu_seqlens_k is None:
        first = torch.arange(batch, device=k.device)[:, None] * k.shape[1]
        max_seqlen_k = k.shape[1]
        lengths = torch.full((batch,), max_seqlen_k, dtype=torch.int32, device=k.device)
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    else:
        check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, q.device, k.shape[0], max_seqlen_k, batch)
        first, lengths = cu_seqlens_k[:-1, None].long(), cu_seqlens_k.diff()
    check_used("seqused_k", seqused_k, lengths)
    keys = keys_from_rows(
        k,
        v,
        first + torch.arange(max_seqlen_k, device=k.device),
        lengths if seqused_k is None else seqused_k,
        with_qv=qv is not None,
        chunk=attention_chunk,
    )
    queries = Queries(q, qv, cu_seqlens_q, seqused_q, max_seqlen_q, False)
    return attend(queries, keys, options, return_attn_probs)


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor | LayerCache,
    v_cache: torch.Tensor | LayerCache | None,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    q_descale: Descale = None,
    k_descale: Descale = None,
    v_descale: Descale = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Result:
    """Append ``k`` and ``v`` to the cache, if given, and attend to it.

    Args:
        q: ``[B, Sq, Hq, D]``, or ``[total_q, Hq, D]`` with ``cu_seqlens_q`` and ``max_seqlen_q``.
        k_cache, v_cache: one of

            * a ``LayerCache`` (``v_cache``: the same handle, or None), with ``page_table``;
            * ``[num_pages, any page size, Hk, D]`` and ``[..., Dv]``, with ``page_table``;
            * ``[cache batch, Sk, Hk, D]`` and ``[..., Dv]``.

            Mutated if ``k`` is given.
        k, v: ``[B, S_new, Hk, D]`` and ``[..., Dv]``, or packed ``[total_new, Hk, D]`` with
            ``cu_seqlens_k_new``; written behind each sequence's ``cache_seqlens`` tokens.
        qv: as in ``flash_attn_func``; token-major caches only.
        rotary_cos, rotary_sin: ``[positions, rotary_dim / 2]``; rotate ``k`` at positions
            ``cache_seqlens + i`` and ``q`` likewise if causal or local, else at ``cache_seqlens``.
        cache_seqlens: int, or int32 ``[B]``: tokens before the append, ``cache_leftpad`` included.
            None: the cache is full (token-major caches without ``k`` only).
        cache_batch_idx: int32 ``[B]``: row of the cache batch, or of ``page_table``.
        cache_leftpad: int32 ``[B]``: first token that counts; token-major caches only.
        page_table: int32 ``[B, columns]``. Entries past a sequence's length may hold anything.
        cu_seqlens_q, cu_seqlens_k_new: int32 ``[B + 1]``.
        rotary_seqlens: int32 ``[B]``, in place of ``cache_seqlens`` for the rotation.
        rotary_interleaved: rotate pairs (0, 1), (2, 3), ...; False: (0, rotary_dim / 2), ...

    Returns:
        Like q, with ``Dv`` for ``D``; with ``return_softmax_lse`` also the LSE, float32
        ``[B, Hq, Sq]`` or ``[Hq, total_q]``.

    Raises:
        InvalidInputError: a shape, dtype, device or value; the message names the argument.
        UnsupportedError: an input requires a gradient; ``scheduler_metadata``; ``qv``,
            ``cache_leftpad``, scales or an ``attention_chunk`` that is no multiple of the page size
            with a ``LayerCache``.
    """
    options = Options(
        softmax_scale,
        causal,
        window_size,
        attention_chunk,
        softcap,
        q_descale,
        k_descale,
        v_descale,
    )
    check_options(options, num_splits, scheduler_metadata)
    call = KVCacheCall(
        q=q,
        qv=qv,
        k_cache=k_cache,
        v_cache=v_cache,
        cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        page_table=page_table,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        options=options,
    )
    if k is not None or v is not None:
        call.append(
            k,
            v,
            cu_seqlens_k_new,
            rotary_cos,
            rotary_sin,
            rotary_seqlens,
            rotary_interleaved=rotary_interleaved,
        )
    else:
        call.refuse_without_append(
            cu_seqlens_k_new=cu_seqlens_k_new,
            rotary_cos=rotary_cos,
            rotary_sin=rotary_sin,
            rotary_seqlens=rotary_seqlens,
        )
    return attend(call.queries, call.keys(), options, return_softmax_lse)
