"""FlashAttention 3's functions over our pages: the facts of its interface, and right values."""

from __future__ import annotations

import inspect
import math
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import FA3_HEADS, FA3_LENGTHS, FA3_VARLEN_LENGTHS
from support.compare import assert_close_enough, assert_lse_close, same_precision_attention, visible

import bicl.flash_attn_interface as interface
from bicl.attention import reference
from bicl.flash_attn_interface import (
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func,
)

REQUIRED = inspect.Parameter.empty

# hopper/flash_attn_interface.py at 0251105a: names in order, with defaults.
DESCALE = {"q_descale": None, "k_descale": None, "v_descale": None}
MASK = {"window_size": (-1, -1), "attention_chunk": 0, "softcap": 0.0}
TUNING = {"num_splits": 1, "pack_gqa": None, "deterministic": False, "sm_margin": 0}
SIGNATURES = {
    "flash_attn_func": {
        "q": REQUIRED, "k": REQUIRED, "v": REQUIRED,
        "softmax_scale": None, "causal": False, "qv": None,
        **DESCALE, **MASK, **TUNING, "return_attn_probs": False,
    },
    "flash_attn_qkvpacked_func": {
        "qkv": REQUIRED, "softmax_scale": None, "causal": False, **DESCALE, **MASK,
        "deterministic": False, "num_heads_q": None, "sm_margin": 0, "return_attn_probs": False,
    },
    "flash_attn_varlen_func": {
        "q": REQUIRED, "k": REQUIRED, "v": REQUIRED,
        "cu_seqlens_q": REQUIRED, "cu_seqlens_k": REQUIRED,
        "max_seqlen_q": REQUIRED, "max_seqlen_k": REQUIRED,
        "seqused_q": None, "seqused_k": None,
        "softmax_scale": None, "causal": False, "qv": None,
        **DESCALE, **MASK, **TUNING, "return_attn_probs": False,
    },
    # Version 3 lacks this one; name and leading arguments are version 2's.
    "flash_attn_varlen_qkvpacked_func": {
        "qkv": REQUIRED, "cu_seqlens": REQUIRED, "max_seqlen": REQUIRED,
        "softmax_scale": None, "causal": False, **DESCALE, **MASK,
        "deterministic": False, "num_heads_q": None, "sm_margin": 0, "return_attn_probs": False,
    },
    "flash_attn_with_kvcache": {
        "q": REQUIRED, "k_cache": REQUIRED, "v_cache": REQUIRED,
        "k": None, "v": None, "qv": None, "rotary_cos": None, "rotary_sin": None,
        "cache_seqlens": None, "cache_batch_idx": None, "cache_leftpad": None,
        "page_table": None, "cu_seqlens_q": None, "cu_seqlens_k_new": None,
        "max_seqlen_q": None, "rotary_seqlens": None, **DESCALE,
        "softmax_scale": None, "causal": False, **MASK, "rotary_interleaved": True,
        "scheduler_metadata": None, "num_splits": 0, "pack_gqa": None, "sm_margin": 0,
        "return_softmax_lse": False,
    },
}  # fmt: skip


def test_every_function_is_exported() -> None:
    assert sorted(interface.__all__) == sorted(SIGNATURES)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_that_of_flash_attention_3(name: str) -> None:
    parameters = inspect.signature(getattr(interface, name)).parameters
    found = {parameter.name: parameter.default for parameter in parameters.values()}
    assert list(found) == list(SIGNATURES[name])
    assert found == SIGNATURES[name]
    kinds = {parameter.kind for parameter in parameters.values()}
    assert kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


def running_sum(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def qkv(
    num_q: int,
    num_k: int,
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    batch: int = 2,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query = torch.randn(batch, num_q, heads[0], head_dim).to(dtype)
    key, value = torch.randn(2, batch, num_k, heads[1], head_dim).to(dtype)
    return query, key, value


# The largest of FlashAttention's shapes take minutes in the reference; GPU tests run them all.
SMALL = [lengths for lengths in FA3_LENGTHS if max(lengths) <= 640]


@pytest.mark.parametrize("heads", FA3_HEADS.values(), ids=FA3_HEADS)
@pytest.mark.parametrize("mask", ["full", "causal", "local"])
@pytest.mark.parametrize("lengths", SMALL, ids=str)
def test_func_on_flash_attentions_own_matrix(
    lengths: tuple[int, int], mask: str, heads: tuple[int, int]
) -> None:
    """(A4)"""
    variant = SMALL.index(lengths)
    dtype = (torch.bfloat16, torch.float16)[variant % 2]
    head_dim = (64, 96, 128, 192)[variant % 4]
    softcap = (0.0, 15.0)[variant % 3 == 0]
    window = (lengths[1] // 3, lengths[1] // 5) if mask == "local" else (-1, -1)
    query, key, value = qkv(*lengths, heads, head_dim, dtype, batch=1)
    out, lse = flash_attn_func(
        query,
        key,
        value,
        causal=mask == "causal",
        window_size=window,
        softcap=softcap,
        return_attn_probs=True,
    )
    options = {
        "scale": head_dim**-0.5,
        "causal": mask == "causal",
        "window_left": window[0],
        "window_right": window[1],
        "softcap": softcap,
    }
    truth, truth_lse = reference.attention(query[0], key[0], value[0], **options)
    simple = same_precision_attention(query[0], key[0], value[0], **options)
    assert out.shape == query.shape
    assert out.dtype == dtype
    assert lse.shape == (1, heads[0], lengths[0])
    assert_close_enough(out[0], truth, simple, softcap=softcap)
    assert_lse_close(lse[0], truth_lse)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [x for x in FA3_VARLEN_LENGTHS if max(x) < 1000], ids=str)
def test_varlen_with_unused_rows_equals_each_sequence_alone(
    lengths: tuple[int, int], causal: bool
) -> None:
    generator = torch.Generator().manual_seed(sum(lengths))
    pick = lambda limit: torch.randint(0, limit + 1, (4,), generator=generator).tolist()  # noqa: E731
    given_q, given_k = pick(lengths[0]), pick(lengths[1])
    used_q = [n - n // 3 for n in given_q]
    used_k = [n - n // 4 for n in given_k]
    starts_q, starts_k = running_sum(given_q), running_sum(given_k)
    query = torch.randn(sum(given_q), 4, 64)
    key, value = torch.randn(2, sum(given_k), 2, 64)
    out, lse = flash_attn_varlen_func(
        query,
        key,
        value,
        starts_q,
        starts_k,
        max(given_q),
        max(given_k),
        torch.tensor(used_q, dtype=torch.int32),
        torch.tensor(used_k, dtype=torch.int32),
        causal=causal,
        return_attn_probs=True,
    )
    assert lse.shape == (4, sum(given_q))
    for i in range(4):
        rows = slice(starts_q[i], starts_q[i] + used_q[i])
        keys = slice(starts_k[i], starts_k[i] + used_k[i])
        truth, truth_lse = reference.attention(
            query[rows], key[keys], value[keys], scale=0.125, causal=causal
        )
        torch.testing.assert_close(out[rows], truth, atol=1e-5, rtol=0)
        assert_lse_close(lse[:, rows], truth_lse)
        unused = slice(rows.stop, starts_q[i + 1])
        assert (out[unused] == 0).all()
        assert torch.isneginf(lse[:, unused]).all()


def test_varlen_with_one_query_and_empty_sequences_under_gqa() -> None:
    """(A38)"""
    query = torch.randn(2, 9, 64)
    key, value = torch.randn(2, 8, 3, 64)
    starts_q = torch.tensor([0, 0, 1, 1, 2], dtype=torch.int32)
    starts_k = torch.tensor([0, 0, 3, 3, 8], dtype=torch.int32)
    out = flash_attn_varlen_func(query, key, value, starts_q, starts_k, 1, 5)
    for row, keys in ((0, slice(0, 3)), (1, slice(3, 8))):
        truth, _ = reference.attention(
            query[row : row + 1], key[keys], value[keys], scale=0.125, causal=False
        )
        torch.testing.assert_close(out[row : row + 1], truth, atol=1e-5, rtol=0)


def test_rows_without_keys_are_exactly_zero() -> None:
    """(q 0, k 100), (q 64, k 0), (q 1, k 65). (A39)"""
    query = torch.randn(65, 4, 64)
    key, value = torch.randn(2, 165, 2, 64)
    out, lse = flash_attn_varlen_func(
        query,
        key,
        value,
        running_sum([0, 64, 1]),
        running_sum([100, 0, 65]),
        64,
        100,
        causal=True,
        return_attn_probs=True,
    )
    assert (out[:64] == 0).all()
    assert torch.isneginf(lse[:, :64]).all()
    assert (out[64] != 0).all()


def test_varlen_takes_a_padded_batch_of_keys() -> None:
    query = torch.randn(5, 2, 64)
    key, value = torch.randn(2, 2, 70, 2, 64)
    used = torch.tensor([65, 3], dtype=torch.int32)
    out = flash_attn_varlen_func(
        query, key, value, running_sum([2, 3]), None, 3, 70, seqused_k=used
    )
    packed = [torch.cat((x[0, :65], x[1, :3])) for x in (key, value)]
    same = flash_attn_varlen_func(query, *packed, running_sum([2, 3]), running_sum([65, 3]), 3, 65)
    torch.testing.assert_close(out, same, atol=1e-6, rtol=0)


def test_packed_forms_equal_the_separate_ones() -> None:
    packed = torch.randn(2, 70, 3, 4, 64)
    q, k, v = packed.unbind(2)
    expected = flash_attn_func(q, k, v, causal=True, window_size=(20, 0))
    options = {"causal": True, "window_size": (20, 0)}
    assert torch.equal(flash_attn_qkvpacked_func(packed, **options), expected)
    flat = flash_attn_varlen_qkvpacked_func(
        packed.flatten(0, 1), running_sum([70, 70]), 70, **options
    )
    torch.testing.assert_close(flat.view_as(expected), expected, atol=1e-6, rtol=0)


def test_packed_gqa_form_splits_heads() -> None:
    packed = torch.randn(2, 70, 6 + 2 * 2, 64)
    q, k, v = packed.split([6, 2, 2], dim=2)
    expected = flash_attn_func(q, k, v)
    assert torch.equal(flash_attn_qkvpacked_func(packed, num_heads_q=6), expected)
    flat = flash_attn_varlen_qkvpacked_func(
        packed.flatten(0, 1), running_sum([70, 70]), 70, num_heads_q=6
    )
    torch.testing.assert_close(flat.view_as(expected), expected, atol=1e-6, rtol=0)


def chunked_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    chunk: int,
    **options: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention confined to chunks of positions, from the mask alone, one head a KV head."""
    num_q, num_k = query.shape[0], key.shape[0]
    mask = visible(num_q, num_k, **options)
    position = torch.arange(num_q)[:, None] + num_k - num_q
    own = torch.div(position, chunk, rounding_mode="floor")
    mask &= torch.arange(num_k) // chunk == own
    scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
    scores = scores.masked_fill(~mask, -math.inf)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", weights, value), torch.logsumexp(scores, -1)


@settings(max_examples=40, deadline=None)
@given(
    num_q=st.integers(1, 90),
    num_k=st.integers(1, 140),
    chunk=st.integers(1, 150),
    causal=st.booleans(),
    left=st.integers(-1, 40),
    right=st.integers(-1, 40),
    seed=st.integers(0, 3),
)
def test_attention_chunk_confines_each_query_to_its_chunk(
    num_q: int, num_k: int, chunk: int, causal: bool, left: int, right: int, seed: int
) -> None:
    torch.manual_seed(seed)
    query, key, value = qkv(num_q, num_k, (2, 2), 32, torch.float32, batch=1)
    out, lse = flash_attn_func(
        query,
        key,
        value,
        causal=causal,
        window_size=(left, right),
        attention_chunk=chunk,
        return_attn_probs=True,
    )
    truth, truth_lse = chunked_reference(
        query[0], key[0], value[0], chunk, causal=causal, window_left=left, window_right=right
    )
    torch.testing.assert_close(out[0], truth, atol=1e-5, rtol=0)
    assert_lse_close(lse[0], truth_lse)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(192, 128), (64, 256), (64, 512), (128, 64)])
def test_values_may_be_wider_or_narrower_than_keys(head_dim: int, value_dim: int) -> None:
    query = torch.randn(1, 5, 4, head_dim)
    key, value = torch.randn(1, 70, 2, head_dim), torch.randn(1, 70, 2, value_dim)
    out = flash_attn_func(query, key, value, causal=True)
    truth, _ = reference.attention(query[0], key[0], value[0], scale=head_dim**-0.5, causal=True)
    assert out.shape == (1, 5, 4, value_dim)
    torch.testing.assert_close(out[0], truth, atol=1e-5, rtol=0)


def test_qv_adds_the_values_to_the_scores() -> None:
    """The absorbed form of latent attention: keys 64 wide, values 256."""
    query, qv = torch.randn(1, 5, 4, 64), torch.randn(1, 5, 4, 256)
    key, value = torch.randn(1, 70, 1, 64), torch.randn(1, 70, 1, 256)
    out = flash_attn_func(query, key, value, causal=True, qv=qv)
    truth, _ = reference.attention(
        torch.cat((query, qv), -1)[0],
        torch.cat((key, value), -1)[0],
        value[0],
        scale=(64 + 256) ** -0.5,
        causal=True,
    )
    torch.testing.assert_close(out[0], truth, atol=1e-5, rtol=0)


def test_fp8_tensors_are_scaled_per_head_and_give_bf16() -> None:
    fp8 = torch.float8_e4m3fn
    query, key, value = (x.to(fp8) for x in qkv(5, 70, (4, 2), 64, torch.float32))
    q_descale, k_descale, v_descale = torch.rand(3, 2, 2) + 0.5
    out = flash_attn_func(
        query,
        key,
        value,
        causal=True,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
    )
    assert out.dtype == torch.bfloat16
    for b in range(2):
        factor_q = q_descale[b].repeat_interleave(2)[None, :, None]
        wide = query[b].float() * factor_q
        k = key[b].float() * k_descale[b][None, :, None]
        v = value[b].float() * v_descale[b][None, :, None]
        truth, _ = reference.attention(wide, k, v, scale=0.125, causal=True)
        simple = same_precision_attention(
            *(x.bfloat16() for x in (wide, k, v)), scale=0.125, causal=True
        )
        assert_close_enough(out[b], truth, simple)


def test_descale_is_read_for_fp8_only() -> None:
    """As in FlashAttention 3: callers pass scales of 1 whatever the dtype."""
    query, key, value = qkv(5, 70, (4, 2), 64, torch.float32)
    scale = torch.full((2, 2), 3.0)
    plain = flash_attn_func(query, key, value)
    assert torch.equal(flash_attn_func(query, key, value, k_descale=scale), plain)


def test_softmax_scale_is_honoured() -> None:
    query, key, value = qkv(5, 70, (4, 2), 64, torch.float32, batch=1)
    out = flash_attn_func(query, key, value, softmax_scale=0.5)
    truth, _ = reference.attention(query[0], key[0], value[0], scale=0.5, causal=False)
    torch.testing.assert_close(out[0], truth, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "tuning",
    [{"num_splits": 3}, {"pack_gqa": True}, {"sm_margin": 8}, {"deterministic": True}],
    ids=str,
)
def test_tuning_arguments_do_not_change_the_answer(tuning: dict[str, object]) -> None:
    query, key, value = qkv(5, 70, (4, 2), 64, torch.float32)
    assert torch.equal(
        flash_attn_func(query, key, value, **tuning), flash_attn_func(query, key, value)
    )


@pytest.mark.parametrize(("batch", "num_q", "num_k"), [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_empty_dimensions(batch: int, num_q: int, num_k: int) -> None:
    query, key, value = qkv(num_q, num_k, (4, 2), 64, torch.float32, batch=batch)
    out, lse = flash_attn_func(query, key, value, causal=True, return_attn_probs=True)
    assert out.shape == query.shape
    assert (out == 0).all()
    assert torch.isneginf(lse).all()


def test_strided_inputs() -> None:
    query, key, value = qkv(5, 70, (4, 2), 64, torch.float32)
    expected = flash_attn_func(query, key, value)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value)]
    assert torch.equal(flash_attn_func(*heads_first), expected)
    dims_first = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (query, key, value)]
    assert torch.equal(flash_attn_func(*dims_first), expected)
