"""One store and two attention calls in a model's own shapes, before it serves.

A combination that no kernel was built for shows here, at load, and not in a request.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from bicl.errors import BiclError, ConfigError
from bicl.frontends.tgi.attention import attention, paged_attention
from bicl.frontends.tgi.kv_cache import KVCache, KVScales
from bicl.frontends.tgi.upstream import DISABLE

__all__ = ["try_pages"]


def try_pages(model: Any) -> None:
    """Try a loaded TGI model's cache on one page.

    Raises:
        ConfigError: naming the model, its shapes and the reason.
    """
    try:
        wrong = bool(_run_once(model).isnan().any())
    except (BiclError, RuntimeError, NotImplementedError) as error:
        raise ConfigError(
            f"{model.model_id} cannot run on BICL pages ({model.num_heads} query and "
            f"{model.num_kv_heads} KV heads of {model.head_size}, {model.dtype}, cache "
            f"{model.kv_cache_dtype}): {error}; {DISABLE}"
        ) from error
    if wrong:
        raise ConfigError(f"attention over BICL pages gives NaN for {model.model_id}; {DISABLE}")


def _run_once(model: Any) -> torch.Tensor:
    """Two tokens: a prompt of both, then two decode rows that see one and two of them."""
    device = torch.device(model.device)
    cache = KVCache(
        num_blocks=1,
        num_heads=model.num_kv_heads,
        head_size=model.head_size,
        dtype=model.kv_cache_dtype,
        device=device,
    )
    one = torch.ones(())
    scales = KVScales(one, one)
    rows = torch.zeros((2, model.num_kv_heads, model.head_size), dtype=model.dtype, device=device)
    query = torch.zeros((2, model.num_heads, model.head_size), dtype=model.dtype, device=device)
    table = torch.zeros((2, 1), dtype=torch.int32, device=device)
    cache.store(key=rows, value=rows, slots=torch.arange(2, device=device), kv_scales=scales)
    prompt = attention(
        query=query,
        key=rows,
        value=rows,
        kv_cache=cache,
        kv_scales=scales,
        seqlen=_seqlen([2], [2], device),
        block_tables=table[:1],
        softmax_scale=1.0,
    )
    decoded = paged_attention(
        query, cache, table, 1.0, table, _seqlen([1, 1], [1, 2], device), 2, kv_scales=scales
    )
    return prompt + decoded


def _seqlen(queries: list[int], lengths: list[int], device: torch.device) -> SimpleNamespace:
    new = torch.tensor(queries, dtype=torch.int32, device=device)
    total = torch.tensor(lengths, dtype=torch.int32, device=device)
    ends = torch.tensor([sum(queries[:i]) for i in range(len(queries) + 1)], dtype=torch.int32)
    return SimpleNamespace(
        input_lengths=new,
        cache_lengths=total - new,
        cu_seqlen_q=ends.to(device),
        max_q=max(queries),
        max_k=max(lengths),
    )
