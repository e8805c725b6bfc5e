"""The path for cards before Hopper, forced on this one: what lacking the Hopper kernels costs."""

from __future__ import annotations

from collections.abc import Callable

from bench.kernels.arena import Arena, PagedBatch
from bench.kernels.contest import attention
from bench.kernels.impls import Contestant
from bench.kernels.report import Report
from bench.kernels.shapes import (
    DECODE_SHAPES,
    MAIN_HEADS,
    PREFILL_SHAPES,
    kv_bytes,
    prefill_flops,
)

__all__ = ["run"]

_DECODE = ("1x4096", "32x4096", "skew")
_PREFILL = ("1x4096", "512+8192b1", "64+8192")


def run(
    report: Report,
    arena: Arena,
    decode: list[Contestant],
    prefill: list[Contestant],
    *,
    rounds: int,
    log: Callable[[str], None],
) -> None:
    """Add rows to ``decode`` and ``prefill``; other sections hold what they compare with."""
    heads = str(MAIN_HEADS)
    for shape in _DECODE if decode else ():
        lengths = DECODE_SHAPES[shape]
        batch = PagedBatch.decode(arena, MAIN_HEADS, lengths)
        samples = attention(report, "decode", shape, batch, decode, rounds=rounds)
        for name, sample in samples.items():
            size = kv_bytes(lengths, MAIN_HEADS.kv)
            report.add("decode", heads, shape, name, sample, num_bytes=size)
            log(f"decode {heads} {shape}: {name} {sample.median:.1f}")
        report.save()
    for shape in _PREFILL if prefill else ():
        problem = PREFILL_SHAPES[shape]
        batch = PagedBatch.prefill(arena, MAIN_HEADS, problem)
        samples = attention(report, "prefill", shape, batch, prefill, rounds=rounds)
        for name, sample in samples.items():
            flops = prefill_flops(problem, MAIN_HEADS.query)
            report.add("prefill", heads, shape, name, sample, flops=flops)
            log(f"prefill {heads} {shape}: {name} {sample.median:.1f}")
        report.save()
