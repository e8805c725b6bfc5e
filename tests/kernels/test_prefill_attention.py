"""prefill_attention against float32 truth, on pools full of NaN and tables full of nonsense."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from support.cases import (
    FA3_HEADS,
    FA3_KVCACHE_LENGTHS,
    FA3_LENGTHS,
    FA3_VARLEN_LENGTHS,
    FP8_DTYPES,
    PAGES_AND_TILES,
    PREFILL_LENGTHS,
    pairwise,
    sampled,
)
from support.compare import assert_close_enough, assert_lse_close
from support.device import DEVICE, truth_of
from support.prefill import (
    check,
    check_replays,
    layout_of,
    num_splits,
    of_pages,
    packed_step,
    run,
)

from bicl.attention.cuda import CudaBackend

pytestmark = pytest.mark.gpu

STORED = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "bf16 on e4m3": (torch.bfloat16, FP8_DTYPES[0]),
    "fp16 on e5m2": (torch.float16, FP8_DTYPES[1]),
}
VARIANTS = {
    "by rule": {},
    "deterministic": {"deterministic": True},
    "sm_80": {"force_sm80": True},
}
CHOICES: dict[str, Sequence[object]] = {
    "stored": list(STORED),
    "head_dim": (32, 64, 80, 96, 120, 128, 160, 192, 256),
    "lengths": list(PREFILL_LENGTHS),
    "group": (1, 2, 3, 4, 8, 9),
    "page_and_tile": PAGES_AND_TILES,
    "variant": list(VARIANTS),
    "window": ((-1, -1), (0, 0), (100, -1), (1000, 20), (-1, 5)),
    "softcap": (0.0, 15.0),
    "causal": (True, False),
    "kv_heads": (1, 3, 8),
}
CASES = [*pairwise(**CHOICES), *sampled(120, **CHOICES)]


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(str(v) for v in c.values()))
def test_prefill_errs_at_most_twice_as_much_as_torch(case: dict[str, object]) -> None:
    dtype, stored = STORED[case["stored"]]
    layout = layout_of(case["kv_heads"], case["head_dim"], stored, *case["page_and_tile"])
    scales = {"k_scale": 0.7, "v_scale": 1.3} if stored.itemsize == 1 else {}
    step = packed_step(
        PREFILL_LENGTHS[case["lengths"]],
        layout,
        group=case["group"],
        dtype=dtype,
        causal=case["causal"],
        **scales,
    )
    left, right = case["window"]
    check(
        step,
        scale=layout.head_dim**-0.5,
        softcap=case["softcap"],
        window_left=left,
        window_right=right,
        **VARIANTS[case["variant"]],
    )


@of_pages
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("heads", list(FA3_HEADS))
@pytest.mark.parametrize(
    "lengths", [*FA3_LENGTHS, *FA3_VARLEN_LENGTHS, *FA3_KVCACHE_LENGTHS], ids=str
)
def test_flash_attention_3_matrix(
    lengths: tuple[int, int], heads: str, head_dim: int, page: int
) -> None:
    """Causal, local and capped by turns; batches of two."""
    num_q_heads, num_kv_heads = FA3_HEADS[heads]
    turn = sum(lengths) + num_kv_heads
    dtype = torch.bfloat16 if turn % 2 else torch.float16
    layout = layout_of(num_kv_heads, head_dim, dtype, page)
    step = packed_step(
        (lengths, (lengths[0] // 2, lengths[1])),
        layout,
        group=num_q_heads // num_kv_heads,
        dtype=dtype,
        causal=turn % 3 != 0,
    )
    check(
        step,
        scale=head_dim**-0.5,
        window_left=lengths[1] // 3 if turn % 4 == 0 else -1,
        softcap=15.0 if turn % 5 == 0 else 0.0,
        repeats=1,
    )


@of_pages
@pytest.mark.parametrize("group", [*range(1, 17), 20, 32, 71])
@pytest.mark.parametrize("force_sm80", [False, True])
def test_every_number_of_query_heads_a_kv_head(force_sm80: bool, group: int, page: int) -> None:
    """A tile of 128 rows ends amid a token's heads where the group does not divide 128."""
    lengths = ((1, 1), (70, 134), (5, 700), (200, 200))
    layout = layout_of(2, 128, torch.bfloat16, page)
    step = packed_step(lengths, layout, group=group, dtype=torch.bfloat16)
    check(step, scale=0.09, force_sm80=force_sm80, repeats=1)


@of_pages
@pytest.mark.parametrize("stored", [torch.bfloat16, FP8_DTYPES[0]], ids=str)
@pytest.mark.parametrize("lengths", [(1, 40000), (300, 40000)], ids=str)
def test_long_contexts(lengths: tuple[int, int], stored: torch.dtype, page: int) -> None:
    step = packed_step((lengths,), layout_of(2, 128, stored, page), group=4, dtype=torch.bfloat16)
    check(step, scale=0.09)


@of_pages
@pytest.mark.parametrize("window_left", [-1, 200])
@pytest.mark.parametrize("scale", [0.7, 4.0])
@pytest.mark.parametrize("lengths", ["ragged", "chunk on a long prefix", "short on a long prefix"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("stored", list(STORED))
def test_scores_that_outgrow_those_before_by_far(
    stored: str, head_dim: int, lengths: str, scale: float, window_left: int, page: int
) -> None:
    """Scores of up to hundreds: the exponents' reference must rise within tiles and splits."""
    dtype, stored_dtype = STORED[stored]
    layout = layout_of(2, head_dim, stored_dtype, page)
    step = packed_step(PREFILL_LENGTHS[lengths], layout, group=4, dtype=dtype)
    for deterministic in (False, True):
        check(step, scale=scale, window_left=window_left, deterministic=deterministic)


@of_pages
@pytest.mark.parametrize("exponent", [-60, -20, 20, 60])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_splits_hold_values_beyond_the_range_of_fp16(
    head_dim: int, exponent: int, page: int
) -> None:
    """Partials may lie in fp16, with a power of two a row.

    That power is added to the row's reference, which rounds: weights move by 1e-6, so outputs may
    differ in bf16's last place from those of values near one, but err no more.
    """
    layout = layout_of(2, head_dim, torch.bfloat16, page)
    step = packed_step(
        PREFILL_LENGTHS["short on a long prefix"], layout, group=4, dtype=torch.bfloat16
    )
    truth = truth_of(step, scale=0.09)
    CudaBackend().store(step.layer, step.key, step.value * 2.0**exponent, step.slots)
    out, lse = run(step, scale=0.09)
    assert_close_enough(out * 2.0**-exponent, truth.out, truth.same_precision)
    assert_lse_close(lse, truth.lse)


@of_pages
@pytest.mark.parametrize("scale", [0.1, 2.0])
@pytest.mark.parametrize("stored", [torch.bfloat16, *FP8_DTYPES], ids=str)
@pytest.mark.parametrize("force_sm80", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("window_left", [-1, 300])
def test_a_row_does_not_depend_on_chunks_prefix_or_batch_mates(
    window_left: int, head_dim: int, force_sm80: bool, stored: torch.dtype, scale: float, page: int
) -> None:
    """Deterministic mode, bit for bit."""
    layout = layout_of(2, head_dim, stored, page)
    lengths = ((3000, 3000), (700, 900))
    step = packed_step(lengths, layout, group=4, dtype=torch.bfloat16)
    options = {"scale": scale, "window_left": window_left}
    options |= {"deterministic": True, "force_sm80": force_sm80}
    together, _ = run(step, **options)
    meta = step.meta
    for last in (1, 63, 64, 313, 777, 1500, 3000):
        alone = replace(
            step,
            query=step.query[3000 - last : 3000],
            meta=replace(
                meta,
                page_table=meta.page_table[:1],
                cache_seqlens=meta.cache_seqlens[:1],
                cu_seqlens_q=torch.tensor([0, last], dtype=torch.int32, device=DEVICE),
            ),
        )
        out, _ = run(alone, **options)
        assert torch.equal(out, together[3000 - last : 3000])
    for cut in (1, 64, 1000, 2047):
        chunk = replace(
            step,
            query=step.query[:cut],
            meta=replace(
                meta,
                page_table=meta.page_table[:1],
                cache_seqlens=torch.tensor([cut], dtype=torch.int32, device=DEVICE),
                cu_seqlens_q=torch.tensor([0, cut], dtype=torch.int32, device=DEVICE),
            ),
        )
        out, _ = run(chunk, **options)
        assert torch.equal(out, together[:cut])


@of_pages
@pytest.mark.parametrize("lengths", list(PREFILL_LENGTHS))
@pytest.mark.parametrize("head_dim", [64, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("stored", [torch.bfloat16, *FP8_DTYPES], ids=str)
def test_fp8_and_wide_heads_on_the_path_of_this_card(
    stored: torch.dtype, head_dim: int, lengths: str, page: int
) -> None:
    """On Hopper wgmma, fp8 on pages of 64 widened while it is loaded. Capped and local by turns."""
    turn = head_dim // 64 + list(PREFILL_LENGTHS).index(lengths)
    step = packed_step(
        PREFILL_LENGTHS[lengths],
        layout_of(2, head_dim, stored, page),
        group=4,
        dtype=torch.bfloat16,
        **({"k_scale": 0.7, "v_scale": 1.3} if stored.itemsize == 1 else {}),
    )
    check(
        step,
        scale=head_dim**-0.5,
        window_left=150 if turn % 3 == 1 else -1,
        softcap=15.0 if turn % 4 == 2 else 0.0,
    )


def test_query_and_out_may_be_slices() -> None:
    layout = layout_of(2, 64, torch.bfloat16)
    step = packed_step(((70, 90), (3, 200)), layout, group=4, dtype=torch.bfloat16)
    expected, _ = run(step, scale=0.125)
    wide = torch.randn(73, 12, 64, device=DEVICE).bfloat16()
    wide[:, 2:10] = step.query
    room = torch.full((73, 20, 64), math.nan, device=DEVICE, dtype=torch.bfloat16)
    backend = CudaBackend()
    backend.plan(step.meta)
    backend.run(wide[:, 2:10], step.layer, step.meta, scale=0.125, out=room[:, 4:12])
    assert torch.equal(room[:, 4:12], expected)
    assert room[:, :4].isnan().all()
    assert room[:, 12:].isnan().all()


def test_rows_past_the_last_sequence_are_left_alone() -> None:
    layout = layout_of(2, 128, torch.float16)
    step = packed_step(((70, 90),), layout, group=4, dtype=torch.float16)
    expected, _ = run(step, scale=0.1)
    padded = replace(step, query=torch.cat([step.query, step.query[:10]]))
    out, lse = run(padded, scale=0.1)
    assert torch.equal(out[:70], expected)
    assert out[70:].isnan().all()
    assert lse[:, 70:].isnan().all()


LAST_WAVES = {
    "all heads in a section": (1, ((880, 9072),) * 6),
    "four heads in a section": (8, ((320, 4416),) * 2),
    "a head in a section": (8, ((256, 4352),) * 7),
}


@of_pages
@pytest.mark.parametrize("window_left", [-1, 4000])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", list(LAST_WAVES))
def test_tiles_that_would_leave_sms_idle_at_the_end(
    name: str, head_dim: int, window_left: int, page: int
) -> None:
    """Tiles of equal cost, some more than fill 132 SMs: the last ones' keys are cut into shares."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("only the wgmma kernel splits keys")
    if torch.cuda.get_device_properties(DEVICE).multi_processor_count != 132:
        pytest.skip("made for 132 SMs")
    kv_heads, lengths = LAST_WAVES[name]
    layout = layout_of(kv_heads, head_dim, torch.bfloat16, page)
    step = packed_step(lengths, layout, group=4, dtype=torch.bfloat16)
    options = {"scale": 0.09, "window_left": window_left}
    assert num_splits(step, window_left=window_left) > 0
    assert num_splits(step, window_left=window_left, deterministic=True) == 0
    for deterministic in (False, True):
        check(step, deterministic=deterministic, **options)
    if window_left < 0:
        check_replays(CudaBackend(), step, scale=0.09)


@of_pages
@pytest.mark.parametrize("deterministic", [False, True])
def test_one_captured_graph_serves_all_lengths(deterministic: bool, page: int) -> None:
    """Captured with tiny sequences, replayed with long, empty and unequal ones."""
    layout = layout_of(8, 128, torch.bfloat16, page)
    lengths = ((400, 3000), (1, 2500), (111, 111), (0, 0))
    step = packed_step(lengths, layout, group=4, dtype=torch.bfloat16)
    backend = CudaBackend(deterministic=deterministic)
    out = check_replays(backend, step, scale=0.1)
    backend.plan(step.meta)
    assert torch.equal(backend.run(step.query, step.layer, step.meta, scale=0.1), out)


def test_layers_with_other_windows_share_a_step() -> None:
    layout = layout_of(2, 64, torch.bfloat16)
    step = packed_step(((300, 700), (20, 500)), layout, group=4, dtype=torch.bfloat16)
    backend = CudaBackend()
    backend.plan(step.meta)
    for window in (-1, 100, -1, 100):
        truth = truth_of(step, scale=0.1, window_left=window)
        out = backend.run(step.query, step.layer, step.meta, scale=0.1, window_left=window)
        assert_close_enough(out, truth.out, truth.same_precision)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"scale": 0.0}, "scale 0"),
        ({"softcap": -1.0}, "softcap"),
        ({"window_left": -2}, "window"),
    ],
)
def test_bad_arguments_are_named(wrong: dict[str, float], message: str) -> None:
    layout = layout_of(1, 64, torch.bfloat16)
    step = packed_step(((3, 3),), layout, group=1, dtype=torch.bfloat16)
    options = {"scale": 0.1} | wrong
    with pytest.raises(ValueError, match=message):
        run(step, **options)  # type: ignore[arg-type]
