"""Latent attention on the GPU against float32, and its store against the CPU's."""

from __future__ import annotations

import math

import pytest
import torch
from support.compare import assert_close_enough, assert_lse_close
from support.latent import LatentStep, latent_step, truth_of

from bicl.attention.mla import LATENT_DIM, VALUE_DIM, LatentAttention, latent_layout
from bicl.attention.pool import KVPool
from bicl.errors import InvalidInputError

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16)
LENGTHS = {
    "1": [1],
    "63": [63],
    "64": [64],
    "65": [65],
    "127 and less": [127, 1, 0, 64],
    "none": [0, 0, 0],
    "4096": [4096],
    "4100": [4100, 3],
    "32768": [32768],
    "as many as CTAs": [1000] * 8,
    "mixed": [2048, 2048, 2048, 0, 9000, 1, 63, 65],
    "one long": [32768, *[512] * 15],
    "steps": [64 * (i + 1) for i in range(64)],
    "many": [129] * 200,
}
HEADS = (1, 8, 16, 20, 32, 64, 100, 128)


@pytest.fixture(scope="module", autouse=True)
def _hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("latent attention is written for compute capability 9.0")


@pytest.fixture(scope="module")
def attention() -> LatentAttention:
    return LatentAttention("cuda", max_batch=256, num_heads=128)


def decode(
    attention: LatentAttention, step: LatentStep, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Into an output that is NaN before."""
    out = torch.full((*step.query.shape[:2], VALUE_DIM), math.nan).to(step.query)
    result = attention.decode(
        *(step.query, step.layer, step.page_table, step.cache_seqlens),
        scale=scale,
        out=out,
        return_lse=True,
    )
    assert isinstance(result, tuple)
    return result


def check(attention: LatentAttention, step: LatentStep, scale: float) -> None:
    out, lse = decode(attention, step, scale)
    truth, true_lse, same = truth_of(step, scale)
    assert_close_enough(out, truth, same)
    assert_lse_close(lse, true_lse)
    again, _ = decode(attention, step, scale)
    assert torch.equal(out, again)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_decode_is_as_exact_as_its_precision(
    attention: LatentAttention, lengths: list[int], dtype: torch.dtype
) -> None:
    check(attention, latent_step(attention, lengths, dtype), LATENT_DIM**-0.5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS)
def test_any_number_of_heads(attention: LatentAttention, heads: int, dtype: torch.dtype) -> None:
    for lengths in ([1, 63, 64, 65, 127, 700], [4100, 0, 3]):
        check(attention, latent_step(attention, lengths, dtype, heads=heads), 0.1)


@pytest.mark.parametrize("heads", [16, 128])
def test_scores_that_rise_and_fall(attention: LatentAttention, heads: int) -> None:
    """The references of the exponents must follow, in every head by itself."""
    step = latent_step(attention, [3000, 500], torch.bfloat16, heads=heads)
    length = 3000
    position = torch.linspace(0, 3, length, device="cuda")[:, None]
    rising = torch.randn(length, LATENT_DIM, device="cuda") * 0.2 + position * step.query[0, 0]
    falling = rising.flip(0) + (3 - position) * step.query[0, heads // 2]
    for rows in (rising, falling):
        latents = [rows.bfloat16(), step.latents[1]]
        other = latent_step(attention, [3000, 500], torch.bfloat16, heads=heads, latents=latents)
        other.query.copy_(step.query)
        check(attention, other, 0.04)


def test_strided_queries_and_outputs(attention: LatentAttention) -> None:
    step = latent_step(attention, [100, 5000], torch.bfloat16)
    expected, _ = decode(attention, step, 0.1)
    wide = torch.randn(2, 16, 640, device="cuda").bfloat16()
    wide[..., 3 : 3 + LATENT_DIM] = step.query
    out = torch.full((16, 2, VALUE_DIM), math.nan, device="cuda").bfloat16().transpose(0, 1)
    for query in (wide[..., 3 : 3 + LATENT_DIM], step.query.transpose(0, 1).contiguous().mT.mT):
        rows = query if query.shape[0] == 2 else query.transpose(0, 1)
        attention.decode(rows, step.layer, step.page_table, step.cache_seqlens, scale=0.1, out=out)
        assert torch.equal(out, expected)


@pytest.mark.parametrize("heads", [16, 32, 128])
def test_a_graph_is_right_for_other_lengths(attention: LatentAttention, heads: int) -> None:
    most, dtype = 5000, torch.bfloat16
    static = latent_step(attention, [most] * 6, dtype, heads=heads)
    out = torch.empty(6, heads, VALUE_DIM, device="cuda", dtype=dtype)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(2):  # as layers do
            attention.decode(
                *(static.query, static.layer, static.page_table, static.cache_seqlens),
                scale=0.05,
                out=out,
            )
    columns = static.page_table.shape[1]
    for lengths in (
        [most] * 6,
        [1, 64, 0, 4999, 65, 300],
        [0] * 6,
        [0, 0, 0, 0, 0, 77],
        [most, 1, 1, 1, 1, 1],
    ):
        step = latent_step(attention, lengths, dtype, heads=heads, columns=columns)
        static.layer.pages.copy_(step.layer.pages)
        static.page_table.copy_(step.page_table)
        static.cache_seqlens.copy_(step.cache_seqlens)
        static.query.copy_(step.query)
        out.fill_(math.nan)
        graph.replay()
        truth, _, same = truth_of(step, 0.05)
        assert_close_enough(out, truth, same)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 130, 3000])
def test_store_writes_what_the_cpu_writes(
    attention: LatentAttention, tokens: int, dtype: torch.dtype
) -> None:
    cpu = LatentAttention("cpu", max_batch=1, num_heads=1)
    layout = latent_layout(dtype)
    ours, theirs = (KVPool([layout], 60, d, fill=math.nan).layers[0] for d in ("cuda", "cpu"))
    wide = torch.randn(tokens, LATENT_DIM + 1).to(dtype)
    slots = torch.randperm(60 * 64)[:tokens]
    slots[::7] = -1
    for rows in (wide[:, 1:], wide[:, :-1].contiguous()):
        attention.store(ours, rows.cuda(), slots.cuda())
        cpu.store(theirs, rows, slots)
        assert torch.equal(ours.pages.cpu().view(torch.int16), theirs.pages.view(torch.int16))


def test_bad_inputs_are_refused(attention: LatentAttention) -> None:
    step = latent_step(attention, [10, 20], torch.bfloat16)
    table, lengths = step.page_table, step.cache_seqlens
    plain = KVPool([latent_layout(torch.bfloat16, swizzle=False)], 4, "cuda").layers[0]
    wide = KVPool([latent_layout(torch.float32)], 4, "cuda").layers[0]
    odd = torch.empty(2, 16, VALUE_DIM + 1, device="cuda").bfloat16()[..., 1:]
    with pytest.raises(InvalidInputError, match="query must be on cuda"):
        attention.decode(step.query.cpu(), step.layer, table, lengths, scale=1.0)
    with pytest.raises(InvalidInputError, match="query must be bfloat16"):
        attention.decode(step.query.half(), step.layer, table, lengths, scale=1.0)
    with pytest.raises(InvalidInputError, match="swizzled on the GPU"):
        attention.decode(step.query, plain, table, lengths, scale=1.0)
    with pytest.raises(InvalidInputError, match="pages must be float16 or bfloat16"):
        attention.decode(step.query.float(), wide, table, lengths, scale=1.0)
    with pytest.raises(InvalidInputError, match="8-byte aligned"):
        attention.decode(step.query, step.layer, table, lengths, scale=1.0, out=odd)
