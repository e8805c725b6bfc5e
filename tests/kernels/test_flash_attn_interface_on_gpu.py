"""FlashAttention 3's functions on a GPU: the same answers as the float32 reference."""

from __future__ import annotations

import math
from itertools import accumulate

import pytest
import torch
from support.cases import FA3_HEADS, FA3_KVCACHE_LENGTHS, FA3_LENGTHS
from support.compare import assert_close_enough, assert_lse_close, same_precision_attention
from support.device import DEVICE

from bicl.attention import reference
from bicl.attention.backend import make_backend
from bicl.attention.pool import KVPool
from bicl.cache.layout import PageLayout
from bicl.flash_attn_interface import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

pytestmark = pytest.mark.gpu


def truth_of(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One sequence: the truth, its LSE, and PyTorch's answer in the same precision."""
    rows = [x.cpu() for x in (query, key, value)]
    out, lse = reference.attention(*rows, **options)
    simple = same_precision_attention(query, key, value, **options)
    return out, lse, simple.cpu()


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("heads", FA3_HEADS.values(), ids=FA3_HEADS)
@pytest.mark.parametrize("mask", ["full", "causal", "local"])
@pytest.mark.parametrize("lengths", [x for x in FA3_LENGTHS if max(x) <= 640], ids=str)
def test_func_on_flash_attentions_own_matrix(
    lengths: tuple[int, int], mask: str, heads: tuple[int, int]
) -> None:
    variant = FA3_LENGTHS.index(lengths)
    dtype = (torch.bfloat16, torch.float16)[variant % 2]
    head_dim = (64, 96, 128, 192)[variant % 4]
    softcap = (0.0, 15.0)[variant % 3 == 0]
    window = (lengths[1] // 3, lengths[1] // 5) if mask == "local" else (-1, -1)
    query = torch.randn(1, lengths[0], heads[0], head_dim, device=DEVICE).to(dtype)
    key, value = torch.randn(2, 1, lengths[1], heads[1], head_dim, device=DEVICE).to(dtype)
    out, lse = flash_attn_func(
        query,
        key,
        value,
        causal=mask == "causal",
        window_size=window,
        softcap=softcap,
        return_attn_probs=True,
    )
    truth, truth_lse, simple = truth_of(
        query[0],
        key[0],
        value[0],
        scale=head_dim**-0.5,
        causal=mask == "causal",
        window_left=window[0],
        window_right=window[1],
        softcap=softcap,
    )
    assert_close_enough(out[0].cpu(), truth, simple, softcap=softcap)
    assert_lse_close(lse[0].cpu(), truth_lse)


def test_varlen_with_empty_sequences_and_unused_rows() -> None:
    """(A38, A39)"""
    given_q, given_k = [0, 64, 1, 70, 5], [100, 0, 65, 134, 3]
    used_q, used_k = [0, 64, 1, 50, 5], [100, 0, 65, 130, 3]
    starts_q, starts_k = [0, *accumulate(given_q)], [0, *accumulate(given_k)]
    query = torch.randn(sum(given_q), 8, 128, device=DEVICE).bfloat16()
    key, value = torch.randn(2, sum(given_k), 2, 128, device=DEVICE).bfloat16()
    out, lse = flash_attn_varlen_func(
        query,
        key,
        value,
        int32(starts_q),
        int32(starts_k),
        max(given_q),
        max(given_k),
        int32(used_q),
        int32(used_k),
        causal=True,
        return_attn_probs=True,
    )
    for i in range(5):
        rows = slice(starts_q[i], starts_q[i] + used_q[i])
        keys = slice(starts_k[i], starts_k[i] + used_k[i])
        truth, truth_lse, simple = truth_of(
            query[rows], key[keys], value[keys], scale=128**-0.5, causal=True
        )
        assert_close_enough(out[rows].cpu(), truth, simple)
        assert_lse_close(lse[:, rows].cpu(), truth_lse)
        assert (out[rows.stop : starts_q[i + 1]] == 0).all()


@pytest.mark.parametrize("chunk", [48, 64, 128])
def test_attention_chunk(chunk: int) -> None:
    query = torch.randn(1, 150, 4, 64, device=DEVICE).half()
    key, value = torch.randn(2, 1, 200, 2, 64, device=DEVICE).half()
    out = flash_attn_func(query, key, value, causal=True, attention_chunk=chunk)
    on_cpu = flash_attn_func(
        query.cpu(), key.cpu(), value.cpu(), causal=True, attention_chunk=chunk
    )
    torch.testing.assert_close(out.cpu(), on_cpu, atol=4e-3, rtol=1e-2)


@pytest.mark.parametrize("kind", ["handle", "paged", "padded"])
@pytest.mark.parametrize(
    ("num_q", "num_k"), [x for x in FA3_KVCACHE_LENGTHS if max(x) <= 2048], ids=str
)
def test_append_with_rotary_equals_the_cpu(num_q: int, num_k: int, kind: str) -> None:
    """Two sequences, one full after the append; every kind of cache. (A4, A40)"""
    room = -(-num_k // 64) * 64
    columns, size = room // 64, 64
    lengths = [room - num_q, (room - num_q) // 2]
    answers = []
    for device in (DEVICE, torch.device("cpu")):
        torch.manual_seed(num_q + num_k)
        pages = torch.randperm(2 * columns).view(2, columns).to(torch.int32)
        key, value = torch.randn(2, 2 * columns, size, 2, 128).half()
        if kind == "handle":
            pool = KVPool([PageLayout(2, 128, torch.float16)], 2 * columns, device, fill=math.nan)
            k_cache = v_cache = pool.layers[0]
            slots = torch.arange(2 * columns * size, device=device)
            flat = [x.flatten(0, 1).to(device) for x in (key, value)]
            make_backend(device).store(k_cache, *flat, slots)
        else:
            shape = (2, room) if kind == "padded" else (2 * columns, size)
            k_cache, v_cache = (x.view(*shape, 2, 128).to(device) for x in (key, value))
        query = torch.randn(2, num_q, 8, 128).half().to(device)
        new_key, new_value = torch.randn(2, 2, num_q, 2, 128).half().to(device)
        angles = torch.rand(room, 32) * 6
        out, lse = flash_attn_with_kvcache(
            query,
            k_cache,
            v_cache,
            new_key,
            new_value,
            rotary_cos=angles.cos().half().to(device),
            rotary_sin=angles.sin().half().to(device),
            cache_seqlens=torch.tensor(lengths, dtype=torch.int32, device=device),
            page_table=None if kind == "padded" else pages.to(device),
            causal=True,
            return_softmax_lse=True,
        )
        answers.append((out.cpu(), lse.cpu()))
    torch.testing.assert_close(answers[0][0], answers[1][0], atol=4e-3, rtol=1e-2)
    torch.testing.assert_close(answers[0][1], answers[1][1], atol=4e-3, rtol=1e-3)


def test_append_past_the_table_writes_nothing() -> None:
    """The host cannot see lengths on the card; slot -1 stores nothing. (A41)"""
    pool = KVPool([PageLayout(2, 64, torch.float16)], 3, DEVICE, fill=math.nan)
    rows = torch.randn(1, 2, 2, 64, device=DEVICE).half()
    table = int32([2])[None]
    flash_attn_with_kvcache(
        torch.randn(1, 2, 4, 64, device=DEVICE).half(),
        pool.layers[0],
        None,
        rows,
        rows,
        cache_seqlens=int32([128]),
        page_table=table,
        causal=True,
    )
    torch.cuda.synchronize()
    assert pool.layers[0].pages.isnan().all()
