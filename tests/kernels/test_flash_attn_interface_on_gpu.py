"""FlashAttention 3's functions on a GPU: the same answers as the float32 reference."""

from __future__ import annotations

import math
from itertools import accumulate

import pytest
import torch
from support.cases import (
    FA3_HEADS,
    FA3_KVCACHE_LENGTHS,
    FA3_LENGTHS,
    FA3_PAGE_SIZES,
    FA3_VARLEN_LENGTHS,
)
from support.compare import assert_close_enough, assert_lse_close, same_precision_attention
from support.device import DEVICE, attention_truth
from support.kvcache import CASES, make_call

from bicl.attention.backend import make_backend
from bicl.attention.pool import KVPool
from bicl.cache.layout import PageLayout
from bicl.errors import BackendError
from bicl.flash_attn_interface import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

pytestmark = pytest.mark.gpu


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def rows(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def check(
    out: torch.Tensor,
    lse: torch.Tensor,
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    **options: object,
) -> None:
    """One sequence: ``out`` ``[q, Hq, dv]`` and ``lse`` ``[Hq, q]`` against the truth."""
    options = {"scale": given[0].shape[-1] ** -0.5} | options
    truth, truth_lse = attention_truth(*given, **options)  # type: ignore[arg-type]
    simple = same_precision_attention(*given, **options)  # type: ignore[arg-type]
    assert_close_enough(out, truth, simple, softcap=float(options.get("softcap", 0.0)))  # type: ignore[arg-type]
    assert_lse_close(lse, truth_lse)


@pytest.mark.parametrize("heads", FA3_HEADS.values(), ids=FA3_HEADS)
@pytest.mark.parametrize("mask", ["full", "causal", "local"])
@pytest.mark.parametrize("lengths", FA3_LENGTHS, ids=str)
def test_func_on_flash_attentions_own_matrix(
    lengths: tuple[int, int], mask: str, heads: tuple[int, int]
) -> None:
    """Dtypes and head_dims by turns."""
    variant = FA3_LENGTHS.index(lengths)
    dtype = (torch.bfloat16, torch.float16)[variant % 2]
    head_dim = (64, 96, 128, 192, 256)[variant % 5]
    softcap = (0.0, 15.0)[variant % 3 == 0]
    window = (lengths[1] // 3, lengths[1] // 5) if mask == "local" else (-1, -1)
    query = rows(1, lengths[0], heads[0], head_dim, dtype=dtype)
    key, value = rows(2, 1, lengths[1], heads[1], head_dim, dtype=dtype)
    out, lse = flash_attn_func(
        query,
        key,
        value,
        causal=mask == "causal",
        window_size=window,
        softcap=softcap,
        return_attn_probs=True,
    )
    check(
        out[0],
        lse[0],
        (query[0], key[0], value[0]),
        causal=mask == "causal",
        window_left=window[0],
        window_right=window[1],
        softcap=softcap,
    )


@pytest.mark.parametrize("heads", FA3_HEADS.values(), ids=FA3_HEADS)
@pytest.mark.parametrize("lengths", FA3_LENGTHS, ids=str)
def test_e4m3_tensors_on_flash_attentions_own_matrix(
    lengths: tuple[int, int], heads: tuple[int, int]
) -> None:
    """Scales a batch and KV head; plain torch gets the scaled values in bf16."""
    variant = FA3_LENGTHS.index(lengths)
    head_dim = (64, 128, 96, 256)[variant % 4]
    causal = bool(variant % 2)
    query = rows(1, lengths[0], heads[0], head_dim, dtype=torch.float8_e4m3fn)
    key, value = rows(2, 1, lengths[1], heads[1], head_dim, dtype=torch.float8_e4m3fn)
    scales = torch.rand(3, 1, heads[1], device=DEVICE) + 0.5
    out, lse = flash_attn_func(
        query,
        key,
        value,
        causal=causal,
        q_descale=scales[0],
        k_descale=scales[1],
        v_descale=scales[2],
        return_attn_probs=True,
    )
    group = heads[0] // heads[1]
    factor, rescale = (
        x[0].repeat_interleave(group)[:, None] for x in (scales[0] * scales[1], scales[2])
    )
    wide = [x[0].float() for x in (query, key, value)]
    wide[0] *= factor
    options = {"scale": head_dim**-0.5, "causal": causal}
    truth, truth_lse = attention_truth(*wide, **options)  # type: ignore[arg-type]
    simple = same_precision_attention(*(x.bfloat16() for x in wide), **options)  # type: ignore[arg-type]
    assert out.dtype == torch.bfloat16
    assert_close_enough(out[0], truth * rescale, (simple.float() * rescale).bfloat16())
    torch.testing.assert_close(lse[0], truth_lse, atol=2e-2, rtol=0)  # scaled queries are rounded


def check_varlen(
    given: tuple[list[int], list[int]],
    used: tuple[list[int], list[int]],
    heads: tuple[int, int],
    head_dim: int,
    *,
    causal: bool,
    window: tuple[int, int] = (-1, -1),
) -> None:
    """Queries and keys that are given, and of them those that count, a sequence."""
    starts = [[0, *accumulate(counts)] for counts in given]
    query = rows(sum(given[0]), heads[0], head_dim, dtype=torch.bfloat16)
    key, value = rows(2, sum(given[1]), heads[1], head_dim, dtype=torch.bfloat16)
    out, lse = flash_attn_varlen_func(
        query,
        key,
        value,
        *map(int32, starts),
        *map(max, given),
        *map(int32, used),
        causal=causal,
        window_size=window,
        return_attn_probs=True,
    )
    options = {"causal": causal, "window_left": window[0], "window_right": window[1]}
    for i, counts in enumerate(zip(*used, strict=True)):
        own, keys = (slice(s[i], s[i] + n) for s, n in zip(starts, counts, strict=True))
        check(out[own], lse[:, own], (query[own], key[keys], value[keys]), **options)
        assert (out[own.stop : starts[0][i + 1]] == 0).all()


@pytest.mark.parametrize("heads", FA3_HEADS.values(), ids=FA3_HEADS)
@pytest.mark.parametrize("mask", ["full", "causal", "local"])
@pytest.mark.parametrize("lengths", FA3_VARLEN_LENGTHS, ids=str)
def test_varlen_on_flash_attentions_own_matrix(
    lengths: tuple[int, int], mask: str, heads: tuple[int, int]
) -> None:
    """Nine sequences of random lengths, every third with rows that are not used."""
    given = tuple(torch.randint(0, most + 1, (9,)).tolist() for most in lengths)
    used = tuple([n - n // 4 * (i % 3 == 0) for i, n in enumerate(own)] for own in given)
    head_dim = (64, 128, 192)[FA3_VARLEN_LENGTHS.index(lengths) % 3]
    window = (lengths[1] // 3, lengths[1] // 5) if mask == "local" else (-1, -1)
    check_varlen(given, used, heads, head_dim, causal=mask == "causal", window=window)


def test_varlen_with_empty_sequences_and_unused_rows() -> None:
    """(A38, A39)"""
    given = [0, 64, 1, 70, 5], [100, 0, 65, 134, 3]
    used = [0, 64, 1, 50, 5], [100, 0, 65, 130, 3]
    check_varlen(given, used, (8, 2), 128, causal=True)


@pytest.mark.parametrize("heads", [(6, 6), (6, 3)], ids=["mha", "gqa"])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 128), (64, 256), (192, 128), (128, 64)])
def test_values_may_be_wider_or_narrower_than_keys(
    head_dim: int, value_dim: int, heads: tuple[int, int]
) -> None:
    query = rows(1, 239, heads[0], head_dim, dtype=torch.bfloat16)
    key = rows(1, 300, heads[1], head_dim, dtype=torch.bfloat16)
    value = rows(1, 300, heads[1], value_dim, dtype=torch.bfloat16)
    out, lse = flash_attn_func(query, key, value, causal=True, return_attn_probs=True)
    assert out.shape == (1, 239, heads[0], value_dim)
    check(out[0], lse[0], (query[0], key[0], value[0]), causal=True)


def test_heads_wider_than_any_kernel_are_refused_by_name() -> None:
    query, key = (rows(1, 70, 2, 64, dtype=torch.bfloat16) for _ in "qk")
    value = rows(1, 70, 2, 512, dtype=torch.bfloat16)
    with pytest.raises(BackendError, match="512"):
        flash_attn_func(query, key, value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case["kind"] != "plain"],  # plain rows are the CPU's
    ids=lambda case: " ".join(str(v) for v in case.values()),
)
def test_every_pair_of_kvcache_features(case: dict[str, object], dtype: torch.dtype) -> None:
    """(A4)"""
    call = make_call(case, 64, dtype)
    out, lse = call.run(DEVICE)
    for part in call.parts:
        truth, truth_lse, simple = call.truth(part)
        assert_close_enough(out[part.rows], truth, simple, softcap=float(case["softcap"]))  # type: ignore[arg-type]
        assert_lse_close(lse[:, part.rows], truth_lse)


@pytest.mark.parametrize("heads", FA3_HEADS.values(), ids=FA3_HEADS)
@pytest.mark.parametrize("page_size", FA3_PAGE_SIZES, ids=str)
@pytest.mark.parametrize(("num_q", "num_k"), FA3_KVCACHE_LENGTHS, ids=str)
def test_kvcache_on_flash_attentions_own_shapes(
    num_q: int, num_k: int, page_size: int | None, heads: tuple[int, int]
) -> None:
    """Two sequences, the new keys among ``num_k``; NaN in whatever no sequence holds."""
    size = page_size or num_k
    columns = -(-num_k // size)
    lengths = [num_k, num_q + (num_k - num_q) // 2]
    pages = torch.randperm(2 * columns + 1, device=DEVICE)[: 2 * columns].view(2, columns)
    if page_size is None:
        pages = torch.arange(2, device=DEVICE)[:, None]
    caches = [
        torch.full((2 * columns + 1, size, heads[1], 128), math.nan, device=DEVICE).bfloat16()
        for _ in "kv"
    ]
    query = rows(2, num_q, heads[0], 128, dtype=torch.bfloat16)
    key, value = rows(2, 2, num_k, heads[1], 128, dtype=torch.bfloat16)
    fresh = [torch.empty(2, num_q, heads[1], 128, device=DEVICE).bfloat16() for _ in "kv"]
    for i, length in enumerate(lengths):
        token = torch.arange(length - num_q, device=DEVICE)
        slots = pages[i, token // size] * size + token % size
        for cache, new, given in zip(caches, fresh, (key, value), strict=True):
            cache.view(-1, heads[1], 128)[slots] = given[i, : length - num_q]
            new[i] = given[i, length - num_q : length]
    out, lse = flash_attn_with_kvcache(
        query,
        *(cache[:2] if page_size is None else cache for cache in caches),
        *fresh,
        cache_seqlens=int32([length - num_q for length in lengths]),
        page_table=None if page_size is None else pages.int(),
        causal=True,
        return_softmax_lse=True,
    )
    for i, length in enumerate(lengths):
        check(out[i], lse[i], (query[i], key[i, :length], value[i, :length]), causal=True)


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
