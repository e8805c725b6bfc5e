"""The CPU backend against the float32 truth, on pools full of NaN and tables full of nonsense."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from support.cases import (
    BATCHES,
    FP8_DTYPES,
    GROUPS,
    HEAD_DIMS,
    LENGTHS,
    PAGES_AND_TILES,
    QUERY_DTYPES,
    Step,
    build_step,
    pairwise,
)
from support.compare import assert_close_enough, assert_lse_close, same_precision_attention

from bicl.attention import reference
from bicl.attention.cpu import CpuBackend
from bicl.attention.pool import KVPool, LayerCache
from bicl.cache.layout import PageLayout

FEATURES = list(
    pairwise(
        batch=list(BATCHES),
        head_dim=HEAD_DIMS,
        group=GROUPS,
        dtype=QUERY_DTYPES,
        page_and_tile=PAGES_AND_TILES,
        swizzle=(False, True),
        causal=(True, False),
        window_left=(-1, 0, 5, 100),
        window_right=(-1, 0, 7),
        softcap=(0.0, 15.0),
        kv_heads=(1, 3),
    )
)


@pytest.fixture
def backend() -> CpuBackend:
    return CpuBackend()


def same_precision(step: Step, **options: object) -> torch.Tensor:
    """PyTorch's answer to a whole step, from the rows before they were stored."""
    out = torch.zeros_like(step.query)
    starts, first = step.meta.cu_seqlens_q.tolist(), 0
    for sequence, keys in enumerate(step.meta.cache_seqlens.tolist()):
        rows = slice(starts[sequence], starts[sequence + 1])
        span = slice(first, first + keys)
        first += keys
        out[rows] = same_precision_attention(
            step.query[rows],
            step.key[span],
            step.value[span],
            causal=step.meta.causal,
            **options,
        )
    return out


def check(backend: CpuBackend, step: Step, **options: object) -> torch.Tensor:
    options = {"scale": step.query.shape[-1] ** -0.5} | options
    poisoned = torch.full_like(step.query, math.nan)
    backend.plan(step.meta)
    out, lse = backend.run(
        step.query, step.layer, step.meta, out=poisoned, return_lse=True, **options
    )
    truth, truth_lse = reference.run(step.query, step.layer, step.meta, **options)
    assert out is poisoned
    assert_close_enough(
        out, truth, same_precision(step, **options), softcap=options.get("softcap", 0.0)
    )
    assert_lse_close(lse, truth_lse)
    assert (out[torch.isneginf(truth_lse).t()] == 0).all()
    return out


@pytest.mark.parametrize("case", FEATURES, ids=lambda case: " ".join(str(v) for v in case.values()))
def test_run_equals_the_truth_for_every_pair_of_features(
    backend: CpuBackend, case: dict[str, object]
) -> None:
    """(A39, A40, A48)"""
    page_size, tile = case["page_and_tile"]
    layout = PageLayout(
        case["kv_heads"],
        case["head_dim"],
        case["dtype"],
        page_size=page_size,
        tile=tile,
        swizzle=case["swizzle"],
    )
    step = build_step(
        BATCHES[case["batch"]],
        layout,
        group=case["group"],
        dtype=case["dtype"],
        causal=case["causal"],
    )
    check(
        backend,
        step,
        window_left=case["window_left"],
        window_right=case["window_right"],
        softcap=case["softcap"],
    )


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", ["decode", "prefill", "extend by 2", "beside others"])
def test_every_length_is_right(backend: CpuBackend, kind: str, length: int) -> None:
    lengths = {
        "decode": [(1, length)],
        "prefill": [(length, length)],
        "extend by 2": [(2, length)],
        "beside others": [(1, 130), (length, length), (1, length), (3, 64)],
    }[kind]
    check(backend, build_step(lengths, PageLayout(2, 64, torch.float32, swizzle=False), group=3))


@pytest.mark.parametrize("query_dtype", QUERY_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
@pytest.mark.parametrize("swizzle", [False, True])
def test_fp8_pages_are_read_at_full_precision_of_what_they_hold(
    backend: CpuBackend, dtype: torch.dtype, query_dtype: torch.dtype, swizzle: bool
) -> None:
    layout = PageLayout(2, 80, dtype, swizzle=swizzle)
    step = build_step(
        BATCHES["mixed"], layout, group=2, dtype=query_dtype, k_scale=0.5, v_scale=0.25
    )
    key, value = reference.gather(step.layer, step.meta.page_table, step.meta.cache_seqlens)
    stored = Step(
        step.layer,
        step.meta,
        step.query,
        key.to(query_dtype),
        value.to(query_dtype),
        step.slots,
    )
    check(backend, stored)


@pytest.mark.parametrize(
    ("query_dtype", "cache_dtype"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.bfloat16),
    ],
    ids=str,
)
def test_query_and_cache_may_differ_in_dtype(
    backend: CpuBackend, query_dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    layout = PageLayout(2, 64, cache_dtype, swizzle=False)
    step = build_step(BATCHES["mixed"], layout, group=2, dtype=query_dtype)
    out = backend.run(step.query, step.layer, step.meta, scale=0.125)
    truth, _ = reference.run(step.query, step.layer, step.meta, scale=0.125)
    assert out.dtype == query_dtype
    torch.testing.assert_close(
        out.float(), truth, atol=1e-2 if query_dtype != torch.float32 else 1e-5, rtol=0
    )


def test_poisoned_pool_gives_the_bits_of_a_zeroed_one(backend: CpuBackend) -> None:
    """65 tokens leave 63 rows of the second page unwritten. (A40)"""
    layout = PageLayout(1, 64, torch.float32, swizzle=False)
    lengths = [(65, 65), (1, 70), (1, 333), (5, 70)]
    answers = []
    for fill in (math.nan, 0.0, math.inf):
        step = build_step(lengths, layout, group=4, fill=fill)
        answers.append(backend.run(step.query, step.layer, step.meta, scale=0.125))
    assert torch.isfinite(answers[0]).all()
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], answers[2])


def test_skewed_decode_reads_no_more_than_a_little_padding(backend: CpuBackend) -> None:
    layout = PageLayout(1, 64, torch.float32, swizzle=False)
    lengths = [(1, 1000)] * 8 + [(1, 8000)]
    step = build_step(lengths, layout, filled=False, fill=0.0)
    backend.plan(step.meta)
    backend.run(step.query, step.layer, step.meta, scale=0.125)
    schedule = backend._planned[1]
    read = schedule.decode_chunks(layout, -1).index.numel() // layout.planes
    needed = sum(-(-keys // 64) for _, keys in lengths)
    assert needed <= read <= 1.25 * needed


def test_window_reads_only_the_pages_inside_it(backend: CpuBackend) -> None:
    """(A44)"""
    layout = PageLayout(2, 64, torch.float32, swizzle=False)
    step = build_step([(1, 1000)] * 3 + [(1, 70)], layout, group=2)
    check(backend, step, window_left=128)
    chunks = backend._planned[1].decode_chunks(layout, 128)
    assert chunks.index.numel() // (2 * 2) <= 4 * 4


def test_layers_with_and_without_window_share_one_step(backend: CpuBackend) -> None:
    """Full layers see all 300 tokens, windowed ones 129: nothing leaks between them. (A9)"""
    layout = PageLayout(1, 64, torch.float32, swizzle=False)
    step = build_step([(300, 300), (1, 300)], layout, group=2)
    backend.plan(step.meta)
    full = backend.run(step.query, step.layer, step.meta, scale=0.125)
    windowed = backend.run(step.query, step.layer, step.meta, scale=0.125, window_left=128)
    again = backend.run(step.query, step.layer, step.meta, scale=0.125)
    assert torch.equal(full, again)
    for left, out in ((-1, full), (128, windowed)):
        truth, _ = reference.run(step.query, step.layer, step.meta, scale=0.125, window_left=left)
        torch.testing.assert_close(out, truth, atol=1e-5, rtol=0)
    assert not torch.allclose(full, windowed)


def test_empty_sequences_give_no_rows_and_no_error(backend: CpuBackend) -> None:
    """cu_seqlens_q = [0, 0, 1, 1, 2], keys 0, 3, 0, 5, nine heads over three. (A38)"""
    layout = PageLayout(3, 64, torch.float32, swizzle=False)
    step = build_step([(0, 0), (1, 3), (0, 0), (1, 5)], layout, group=3)
    assert check(backend, step).shape == (2, 9, 64)


def test_no_rows_without_keys_reach_the_output(backend: CpuBackend) -> None:
    """(A39)"""
    layout = PageLayout(3, 64, torch.float32, swizzle=False)
    step = build_step([(0, 100), (64, 0), (1, 65)], layout, group=3)
    out = check(backend, step)
    assert (out[:64] == 0).all()
    assert (out[64] != 0).any()


def test_rows_past_the_last_sequence_are_zero(backend: CpuBackend) -> None:
    layout = PageLayout(1, 64, torch.float32, swizzle=False)
    step = build_step([(1, 65), (1, 3)], layout)
    padded = torch.randn(5, 1, 64)
    out, lse = backend.run(padded, step.layer, step.meta, scale=0.125, return_lse=True)
    assert (out[2:] == 0).all()
    assert torch.isneginf(lse[:, 2:]).all()
    assert torch.isfinite(lse[:, :2]).all()


def test_empty_batch(backend: CpuBackend) -> None:
    step = build_step([], PageLayout(1, 64, torch.float32))
    assert backend.run(step.query, step.layer, step.meta, scale=1.0).shape == (0, 1, 64)


def test_strided_queries_keys_and_values_of_a_fused_projection(backend: CpuBackend) -> None:
    layout = PageLayout(2, 64, torch.float32, swizzle=False)
    step = build_step([(70, 70), (1, 1)], layout, group=2, filled=False)
    fused = torch.randn(71, 8 * 64)
    query = fused[:, : 4 * 64].view(71, 4, 64)
    key = fused[:, 4 * 64 : 6 * 64].view(71, 2, 64)
    value = fused[:, 6 * 64 :].view(71, 2, 64)
    backend.store(step.layer, key, value, step.slots)
    out = backend.run(query, step.layer, step.meta, scale=0.125)
    assert torch.equal(out, backend.run(query.contiguous(), step.layer, step.meta, scale=0.125))
    truth, _ = reference.run(query, step.layer, step.meta, scale=0.125)
    torch.testing.assert_close(out, truth, atol=1e-5, rtol=0)


def test_output_may_be_a_view(backend: CpuBackend) -> None:
    layout = PageLayout(2, 64, torch.float32, swizzle=False)
    step = build_step(BATCHES["mixed"], layout, group=2)
    wide = torch.full((step.query.shape[0], 4, 128), 7.0)
    backend.run(step.query, step.layer, step.meta, scale=0.125, out=wide[..., 32:96])
    plain = backend.run(step.query, step.layer, step.meta, scale=0.125)
    assert torch.equal(wide[..., 32:96], plain)
    assert (wide[..., :32] == 7).all()
    assert (wide[..., 96:] == 7).all()


def test_run_reads_a_step_that_was_not_planned(backend: CpuBackend) -> None:
    layout = PageLayout(1, 64, torch.float32, swizzle=False)
    first = build_step([(1, 65)], layout)
    second = build_step([(1, 130)], layout, seed=1)
    backend.plan(first.meta)
    out = backend.run(second.query, second.layer, second.meta, scale=0.125)
    truth, _ = reference.run(second.query, second.layer, second.meta, scale=0.125)
    torch.testing.assert_close(out, truth, atol=1e-5, rtol=0)


def test_replanning_reads_changed_tensors(backend: CpuBackend) -> None:
    """Buffers kept from step to step, as under CUDA graphs: plan again, same objects."""
    layout = PageLayout(1, 64, torch.float32, swizzle=False)
    step = build_step([(1, 65)], layout)
    backend.plan(step.meta)
    backend.run(step.query, step.layer, step.meta, scale=0.125)
    step.meta.cache_seqlens.fill_(3)
    backend.plan(step.meta)
    out = backend.run(step.query, step.layer, step.meta, scale=0.125)
    truth, _ = reference.run(step.query, step.layer, step.meta, scale=0.125)
    torch.testing.assert_close(out, truth, atol=1e-5, rtol=0)


def test_same_sequence_in_any_pages_gives_the_same_bits(backend: CpuBackend) -> None:
    """First, last or scattered pages; only addresses differ. (A24, A43)"""
    layout = PageLayout(3, 64, torch.bfloat16, swizzle=False)
    answers = []
    key, value = torch.randn(2, 130, 3, 64, dtype=torch.bfloat16)
    query = torch.randn(1, 9, 64, dtype=torch.bfloat16)
    for pages in ([0, 1, 2], [497, 498, 499], [499, 3, 250]):
        pool = KVPool([layout], 500, "cpu", fill=math.nan)
        step = build_step([(1, 130)], layout, filled=False)
        slots = torch.tensor([pages[t // 64] * 64 + t % 64 for t in range(130)])
        step.meta.page_table[0, :3] = torch.tensor(pages, dtype=torch.int32)
        backend.store(pool.layers[0], key, value, slots)
        untouched = [page for page in range(500) if page not in pages]
        assert pool.layers[0].pages[untouched].isnan().all()
        answers.append(backend.run(query, pool.layers[0], step.meta, scale=0.125))
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], answers[2])


def test_addresses_beyond_32_bits() -> None:
    """Row numbers of a pool above 2^31 elements, by arithmetic alone. (A24, A43)"""
    from bicl.ops.cpu.addressing import plane_index, row_index

    layout = PageLayout(8, 128, torch.float16, swizzle=True)
    page = 2**31 // (layout.page_bytes // 2) + 5
    units = row_index(layout, np.array([page * 64 + 63])).view(8, 2, -1)
    slot = page * 64 + 63
    expected = [
        [
            [layout.element_offset(slot, head, plane, dim) // 8 for dim in range(0, 128, 8)]
            for plane in (0, 1)
        ]
        for head in range(8)
    ]
    assert units.tolist() == expected
    assert int(units.min()) * 8 > 2**31
    planes = plane_index(layout, np.array([[page]], dtype=np.int32))
    assert sorted(planes.tolist())[0] * 8 == layout.element_offset(page * 64, 0, 0, 0)


def test_long_prefill_chunk_on_long_prefix_with_softcap_keeps_scores_bounded(
    backend: CpuBackend,
) -> None:
    layout = PageLayout(1, 32, torch.float32, tile=32, swizzle=False)
    step = build_step([(300, 3000)], layout, group=8)
    check(backend, step, softcap=20.0)


def test_value_scale_multiplies_the_output(backend: CpuBackend) -> None:
    layout = PageLayout(1, 64, torch.float8_e4m3fn, swizzle=False)
    step = build_step([(1, 65)], layout)
    doubled = LayerCache(step.layer.pages, layout, 1.0, 2.0)
    once = backend.run(step.query, step.layer, step.meta, scale=0.125)
    twice = backend.run(step.query, doubled, step.meta, scale=0.125)
    torch.testing.assert_close(twice, 2 * once)


def test_pool_above_two_to_the_31_elements() -> None:
    """A sequence in the last pages equals the same one in the first. (A24, A43)

    Memory that nobody touches is never committed, so the 2 GiB cost nothing.
    """
    layout = PageLayout(8, 128, torch.float8_e4m3fn, swizzle=False)
    num_pages = 2**31 // layout.page_bytes + 8
    layer = KVPool([layout], num_pages, "cpu").layers[0]
    assert layer.pages.numel() > 2**31
    backend = CpuBackend()
    key, value = torch.randn(2, 130, 8, 128)
    query = torch.randn(3, 16, 128)
    answers = []
    for first in (0, num_pages - 3):
        step = build_step([(3, 130)], layout, filled=False)
        step.meta.page_table[0, :3] = torch.arange(first, first + 3, dtype=torch.int32)
        backend.store(layer, key, value, first * 64 + torch.arange(130))
        answers.append(backend.run(query, layer, step.meta, scale=0.1))
        backend.store(layer, key[:1] * 0, value[:1] * 0, torch.tensor([(num_pages - 1) * 64 + 63]))
    assert torch.equal(*answers)


def test_threads_with_steps_of_their_own_share_a_backend(backend: CpuBackend) -> None:
    layout = PageLayout(2, 64, torch.float32, swizzle=False)
    steps = [build_step([(1, 65 + i), (1, 300)], layout, group=2, seed=i) for i in range(4)]
    truths = [reference.run(s.query, s.layer, s.meta, scale=0.125)[0] for s in steps]

    def work(number: int) -> float:
        step, worst = steps[number], 0.0
        for _ in range(50):
            out = backend.run(step.query, step.layer, step.meta, scale=0.125)
            worst = max(worst, float((out - truths[number]).abs().max()))
        return worst

    with ThreadPoolExecutor(4) as pool:
        assert max(pool.map(work, range(4))) < 1e-5
