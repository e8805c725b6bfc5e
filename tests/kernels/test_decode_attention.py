"""decode_attention against float32 truth, on pools full of NaN and tables full of nonsense."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from support.cases import DECODE_LENGTHS, FP8_DTYPES, PAGES_AND_TILES, Step, pairwise, sampled
from support.compare import assert_close_enough, assert_lse_close
from support.device import decode_step, truth_of

from bicl.attention.cuda import CudaBackend
from bicl.attention.pool import LayerCache
from bicl.cache.layout import PageLayout
from bicl.ops.cuda.decode_attention import decode_attention, plan_bytes, plan_decode
from bicl.ops.cuda.workspace import Workspace

pytestmark = pytest.mark.gpu

STORED = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "bf16 on e4m3": (torch.bfloat16, FP8_DTYPES[0]),
    "fp16 on e4m3": (torch.float16, FP8_DTYPES[0]),
    "bf16 on e5m2": (torch.bfloat16, FP8_DTYPES[1]),
    "fp16 on e5m2": (torch.float16, FP8_DTYPES[1]),
}
SCHEDULES = {
    "by rule": {},
    "stream-K": {"force_cluster": 1},
    "stream-K, 7 CTAs": {"force_cluster": 1, "force_grid": 7},
    "clusters of 2": {"force_cluster": 2},
    "clusters of 8": {"force_cluster": 8},
    "deterministic": {"deterministic": True},
    "deterministic, 11 CTAs": {"deterministic": True, "force_grid": 11},
    "sm_80": {"force_sm80": True},
    "sm_80 deterministic": {"force_sm80": True, "deterministic": True},
}
CHOICES: dict[str, Sequence[object]] = {
    "stored": list(STORED),
    "head_dim": (64, 80, 96, 128, 192, 256),
    "lengths": list(DECODE_LENGTHS),
    "group": (1, 4, 8, 12, 16, 20),
    "page_and_tile": PAGES_AND_TILES,
    "schedule": list(SCHEDULES),
    "window_left": (-1, 0, 100, 5000),
    "softcap": (0.0, 15.0),
    "kv_heads": (1, 3, 8),
}
CASES = [*pairwise(**CHOICES), *sampled(120, **CHOICES)]


@pytest.fixture(scope="module")
def workspace() -> Workspace:
    made = Workspace("cuda", 256, 16, 1 << 18, deterministic=True)
    made.partials.fill_(0xFF)  # NaN: what is read must have been written
    return made


def run(step: Step, workspace: Workspace, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Without a plan, then with one, which must give the same bits. Outputs are poisoned
    beforehand, counters checked afterwards."""
    out, lse = run_once(step, workspace, None, **options)
    plan = plan_of(step, **options)
    if plan is not None:
        planned, planned_lse = run_once(step, workspace, plan, **options)
        assert torch.equal(planned, out)
        assert torch.equal(planned_lse, lse)
    return out, lse


def plan_of(step: Step, **options: object) -> torch.Tensor | None:
    """None where forced clusters are more CTAs than a plan has room for: those that are not forced
    fit the card at once."""
    shared = ("window_left", "deterministic", "force_sm80", "force_cluster", "force_grid")
    meta = step.meta
    plan = torch.full(
        (plan_bytes(meta.batch_size),), 0xFF, dtype=torch.uint8, device=step.query.device
    )
    try:
        plan_decode(
            plan,
            step.layer,
            meta.page_table,
            meta.cache_seqlens,
            num_q_heads=step.query.shape[1],
            **{k: options[k] for k in shared if k in options},
        )  # type: ignore[arg-type]
    except RuntimeError as error:
        if options.get("force_cluster") == 8 and "the plan of this decode step" in str(error):
            return None
        raise
    return plan


def run_once(
    step: Step, workspace: Workspace, plan: torch.Tensor | None, **options: object
) -> tuple[torch.Tensor, torch.Tensor]:
    query, meta = step.query, step.meta
    out = torch.full_like(query, math.nan)
    lse = torch.full((query.shape[1], query.shape[0]), math.nan, device=query.device)
    try:
        decode_attention(
            query,
            step.layer,
            meta.page_table,
            meta.cache_seqlens,
            workspace,
            out=out,
            lse=lse,
            plan=plan,
            **options,
        )  # type: ignore[arg-type]
    except RuntimeError as error:
        if "is not built" in str(error):
            pytest.skip(str(error))
        raise
    assert not workspace.counters.any(), "counters must be zero between launches"
    return out, lse


def layout_of(kv_heads: int, head_dim: int, stored: torch.dtype, page_and_tile=(64, 64)):
    return PageLayout(kv_heads, head_dim, stored, *page_and_tile)


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(str(v) for v in c.values()))
def test_decode_errs_at_most_twice_as_much_as_torch(
    backend: CudaBackend, workspace: Workspace, case: dict[str, object]
) -> None:
    dtype, stored = STORED[case["stored"]]
    layout = layout_of(case["kv_heads"], case["head_dim"], stored, case["page_and_tile"])
    scales = {"k_scale": 0.7, "v_scale": 1.3} if stored.itemsize == 1 else {}
    step = decode_step(
        backend, DECODE_LENGTHS[case["lengths"]], layout, group=case["group"], dtype=dtype, **scales
    )
    options = {k: case[k] for k in ("window_left", "softcap")} | {"scale": layout.head_dim**-0.5}
    truth = truth_of(step, **options)
    for _ in range(2):
        out, lse = run(step, workspace, **options, **SCHEDULES[case["schedule"]])
        assert_close_enough(out, truth.out, truth.same_precision, softcap=case["softcap"])
        assert_lse_close(lse, truth.lse)


@pytest.mark.parametrize("length", [32768, 40000])
def test_long_contexts(backend: CudaBackend, workspace: Workspace, length: int) -> None:
    step = decode_step(
        backend, [length], layout_of(8, 128, torch.bfloat16), group=4, dtype=torch.bfloat16
    )
    truth = truth_of(step, scale=0.09)
    for schedule in SCHEDULES.values():
        out, lse = run(step, workspace, scale=0.09, **schedule)
        assert_close_enough(out, truth.out, truth.same_precision)
        assert_lse_close(lse, truth.lse)


@pytest.mark.parametrize("stored", ["bf16", "bf16 on e4m3"])
@pytest.mark.parametrize(("kv_heads", "limit"), [(1, 768 * 64), (2, 256 * 64), (4, 256 * 64)])
def test_few_pairs_leave_clusters_when_they_are_long(
    backend: CudaBackend, workspace: Workspace, stored: str, kv_heads: int, limit: int
) -> None:
    dtype, pages = STORED[stored]
    for length in (limit, limit + 1):
        step = decode_step(backend, [length], layout_of(kv_heads, 128, pages), group=4, dtype=dtype)
        truth = truth_of(step, scale=0.09)
        for schedule in ({}, {"deterministic": True}):
            out, lse = run(step, workspace, scale=0.09, **schedule)
            assert_close_enough(out, truth.out, truth.same_precision)
            assert_lse_close(lse, truth.lse)


@pytest.mark.parametrize("group", [*range(1, 17), 20, 32, 71])
@pytest.mark.parametrize("stored", ["bf16", "fp16 on e4m3"])
def test_every_number_of_query_heads_a_kv_head(
    backend: CudaBackend, workspace: Workspace, stored: str, group: int
) -> None:
    dtype, pages = STORED[stored]
    layout = layout_of(2, 128, pages)
    step = decode_step(backend, [300, 65, 1, 0, 2000], layout, group=group, dtype=dtype)
    truth = truth_of(step, scale=0.09)
    for schedule in ({}, {"force_cluster": 1, "force_grid": 7}, {"deterministic": True}):
        out, lse = run(step, workspace, scale=0.09, **schedule)
        assert_close_enough(out, truth.out, truth.same_precision)
        assert_lse_close(lse, truth.lse)


@pytest.mark.parametrize("stored", ["bf16", "fp16 on e4m3"])
@pytest.mark.parametrize(
    ("head_dim", "tile"),
    [(dim, 64) for dim in (8, 24, 40, 72, 104, 112, 120, 136, 160, 200, 248)]
    + [(dim, 32) for dim in (8, 32, 40, 72, 104, 120, 136, 160, 184, 248)],  # 224 is not built
)
def test_head_dims_between_the_compiled_ones(
    backend: CudaBackend, workspace: Workspace, head_dim: int, tile: int, stored: str
) -> None:
    """(A48)"""
    dtype, pages = STORED[stored]
    layout = layout_of(2, head_dim, pages, (64, tile))
    step = decode_step(backend, [300, 65, 1, 0, 2000], layout, group=4, dtype=dtype)
    truth = truth_of(step, scale=head_dim**-0.5)
    for schedule in ({}, {"force_cluster": 1}, {"force_sm80": True}):
        out, lse = run(step, workspace, scale=head_dim**-0.5, **schedule)
        assert_close_enough(out, truth.out, truth.same_precision)
        assert_lse_close(lse, truth.lse)


@pytest.mark.parametrize("stored", ["bf16", "bf16 on e4m3"])
@pytest.mark.parametrize("lengths", ["alike", "skewed", "many"])
def test_a_step_gives_the_same_bits_however_often_it_runs(
    backend: CudaBackend, workspace: Workspace, lengths: str, stored: str
) -> None:
    """A race would show as another result now and then."""
    dtype, pages = STORED[stored]
    step = decode_step(
        backend, DECODE_LENGTHS[lengths], layout_of(8, 128, pages), group=4, dtype=dtype
    )
    for schedule in ({}, {"force_cluster": 1}, {"force_cluster": 4}):
        first, first_lse = run(step, workspace, scale=0.09, **schedule)
        for _ in range(30):
            out, lse = run(step, workspace, scale=0.09, **schedule)
            assert torch.equal(out, first)
            assert torch.equal(lse, first_lse)


def test_empty_sequences_give_zeros(backend: CudaBackend, workspace: Workspace) -> None:
    step = decode_step(
        backend, [0, 0, 0], layout_of(2, 64, torch.float16), group=4, dtype=torch.float16
    )
    for schedule in SCHEDULES.values():
        out, lse = run(step, workspace, scale=1.0, **schedule)
        assert (out == 0).all()
        assert torch.isneginf(lse).all()  # (A52)


@pytest.mark.parametrize("stored", [torch.bfloat16, FP8_DTYPES[0]], ids=["bf16", "e4m3"])
@pytest.mark.parametrize("head_dim", [96, 128])
def test_deterministic_results_do_not_depend_on_batch_mates_or_schedule(
    backend: CudaBackend, workspace: Workspace, head_dim: int, stored: torch.dtype
) -> None:
    lengths = [5000, 64, 1, 777, 512, 4096, 300, 12000, 450, 8200]
    tile = 32 if head_dim == 96 else 64
    layout = layout_of(8, head_dim, stored, (64, tile))
    step = decode_step(backend, lengths, layout, group=4, dtype=torch.bfloat16)

    def rows(span: slice, **options: object) -> torch.Tensor:
        out = torch.empty_like(step.query[span])
        decode_attention(
            step.query[span],
            step.layer,
            step.meta.page_table[span],
            step.meta.cache_seqlens[span],
            workspace,
            out=out,
            scale=0.1,
            deterministic=True,
            **options,
        )  # type: ignore[arg-type]
        return out

    together = rows(slice(None))
    alone = [rows(slice(i, i + 1)) for i in range(len(lengths))]
    assert torch.equal(torch.cat(alone), together)
    for options in (
        {"force_grid": 1},
        {"force_grid": 60},
        {"force_grid": 131},
        {"force_cluster": 1},
    ):
        assert torch.equal(rows(slice(None), **options), together)
    assert torch.equal(rows(slice(2, 6)), together[2:6])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("stored", ["bf16", "bf16 on e4m3"])
@pytest.mark.parametrize(
    "lengths",
    [
        [9000] + [1] * 60,  # one CTA ends dozens of heads while others share one
        [1] * 31 + [0, 0, 5000],
        [64, 0, 130] * 50,
        [(97 * i) % 130 for i in range(600)],  # more lengths than a warp counts at a time
        [4096, 1],  # a small batch whose lengths are too uneven for clusters
        [1500] * 3,  # clusters for which there are more SMs than work
    ],
    ids=["long and short", "short and long", "padding between", "crowd", "uneven pair", "even"],
)
def test_shares_of_uneven_batches_add_up(
    backend: CudaBackend,
    workspace: Workspace,
    lengths: list[int],
    stored: str,
    deterministic: bool,
) -> None:
    dtype, pages = STORED[stored]
    step = decode_step(backend, lengths, layout_of(8, 128, pages), group=8, dtype=dtype)
    truth = truth_of(step, scale=0.09)
    out, lse = run(step, workspace, scale=0.09, deterministic=deterministic)
    assert_close_enough(out, truth.out, truth.same_precision)
    assert_lse_close(lse, truth.lse)


def test_query_rows_that_copies_cannot_read_are_refused(
    backend: CudaBackend, workspace: Workspace
) -> None:
    step = decode_step(
        backend, [70, 3], layout_of(2, 64, torch.bfloat16), group=4, dtype=torch.bfloat16
    )
    odd = torch.zeros(2, 8, 68, device="cuda", dtype=torch.bfloat16)[..., 2:66]
    with pytest.raises(ValueError, match="query rows must be 16-byte aligned"):
        run(replace(step, query=odd), workspace, scale=0.1)


def test_query_and_out_may_be_slices(backend: CudaBackend, workspace: Workspace) -> None:
    step = decode_step(
        backend, [70, 3, 200], layout_of(2, 64, torch.bfloat16), group=4, dtype=torch.bfloat16
    )
    expected, _ = run(step, workspace, scale=0.125)
    wide = torch.randn(3, 12, 64, device="cuda").bfloat16()
    wide[:, 2:10] = step.query
    room = torch.full((3, 20, 64), math.nan, device="cuda", dtype=torch.bfloat16)
    decode_attention(
        wide[:, 2:10],
        step.layer,
        step.meta.page_table,
        step.meta.cache_seqlens,
        workspace,
        out=room[:, 4:12],
        scale=0.125,
    )
    assert torch.equal(room[:, 4:12], expected)
    assert room[:, :4].isnan().all()
    assert room[:, 12:].isnan().all()


def test_pools_above_two_billion_elements(backend: CudaBackend, workspace: Workspace) -> None:
    layout = layout_of(8, 128, torch.float16)
    num_pages = (1 << 31) // (layout.page_bytes // 2) + 40  # the last pages lie past 2**31
    if torch.cuda.mem_get_info()[0] < num_pages * layout.page_bytes * 1.1:
        pytest.skip("needs 5 GB of free device memory")
    small = decode_step(backend, [300, 64], layout, group=4, dtype=torch.float16)
    expected, _ = run(small, workspace, scale=0.1)
    pages = torch.empty(layout.shape(num_pages), dtype=torch.float16, device="cuda")
    shift = num_pages - small.layer.num_pages
    pages[shift:] = small.layer.pages
    table = small.meta.page_table.clone()
    for i, length in enumerate([300, 64]):
        table[i, : layout.pages_for(length)] += shift
    out = torch.empty_like(small.query)
    decode_attention(
        small.query,
        LayerCache(pages, layout),
        table,
        small.meta.cache_seqlens,
        workspace,
        out=out,
        scale=0.1,
    )
    assert torch.equal(out, expected)
