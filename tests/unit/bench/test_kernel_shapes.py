"""Bytes and operations behind the rates of the kernel benchmarks."""

import pytest

from bench.kernels.shapes import (
    DECODE_SHAPES,
    HEADS,
    LATENT_HEADS,
    MLA_SHAPES,
    PREFILL_SHAPES,
    PrefillShape,
    causal_pairs,
    kv_bytes,
    latent_bytes,
    prefill_flops,
    store_bytes,
)


@pytest.mark.parametrize(
    ("shape", "kv_heads", "megabytes"),
    [
        ("1x4096", 8, 16.8),
        ("1x32768", 8, 134.2),
        ("32x4096", 8, 536.9),
        ("32x16384", 8, 2147.5),
        ("skew", 8, 394.3),
        ("mix64", 8, 545.3),
        ("1x512", 8, 2.1),
        ("32x16384", 32, 8589.9),
    ],
)
def test_kv_bytes_agree_with_the_published_peer_table(shape, kv_heads, megabytes):
    assert kv_bytes(DECODE_SHAPES[shape], kv_heads) / 1e6 == pytest.approx(megabytes, abs=0.06)


def test_latents_are_measured_at_the_shapes_of_the_published_peer_table():
    assert str(LATENT_HEADS) == "16/1 d576"
    megabytes = [latent_bytes(DECODE_SHAPES[shape]) / 1e6 for shape in MLA_SHAPES]
    assert [round(x, 1) for x in megabytes] == [4.7, 37.7, 37.7, 151.0, 151.0, 151.0, 604.0, 110.9]


def test_fp8_halves_the_bytes():
    assert kv_bytes([100], 8, element_bytes=1) * 2 == kv_bytes([100], 8)


@pytest.mark.parametrize(("new", "total"), [(1, 1), (1, 17), (5, 5), (7, 64), (64, 64)])
def test_causal_pairs_count_what_the_mask_keeps(new, total):
    offset = total - new
    kept = sum(1 for query in range(new) for key in range(total) if key <= query + offset)
    assert causal_pairs(new, total) == kept


@pytest.mark.parametrize(
    ("shape", "microseconds", "tflops"),
    [("1x4096", 231, 594), ("4x2048", 271, 507), ("512+8192b1", 108, 653)],
)
def test_flops_agree_with_the_published_peer_table(shape, microseconds, tflops):
    rate = prefill_flops(PREFILL_SHAPES[shape], 32) / microseconds / 1e6
    assert rate == pytest.approx(tflops, rel=0.01)


def test_flops_add_up_over_sequences():
    one = PrefillShape((512,), (8704,))
    assert prefill_flops(PREFILL_SHAPES["512+8192b8"], 32) == 8 * prefill_flops(one, 32)


def test_shape_names_say_what_they_are():
    assert DECODE_SHAPES["8x4096"] == (4096,) * 8
    assert PREFILL_SHAPES["32+2048b16"] == PrefillShape((32,) * 16, (2080,) * 16)
    assert PREFILL_SHAPES["64+8192"] == PrefillShape((64,), (8256,))
    assert [str(heads) for heads in HEADS] == ["32/8", "32/32", "64/8"]


def test_store_counts_bytes_read_and_written():
    assert store_bytes(8192, 8) == 67_108_864
