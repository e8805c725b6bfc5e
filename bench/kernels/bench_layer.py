"""One layer of a decode step: store the new token's K and V, then attend.

This is where programmatic dependent launch shows honestly: the attention kernel begins to stream
old pages while the store of the newest token still runs.
"""

from __future__ import annotations

from collections.abc import Callable

from bench.kernels.arena import Arena, PagedBatch
from bench.kernels.contest import attention
from bench.kernels.impls import Contestant
from bench.kernels.report import Report
from bench.kernels.shapes import DECODE_SHAPES, MAIN_HEADS

__all__ = ["SHAPES", "run"]

SHAPES = ("1x4096", "8x4096", "32x4096", "64x2048")


def run(
    report: Report,
    arena: Arena,
    contestants: list[Contestant],
    *,
    rounds: int,
    log: Callable[[str], None],
) -> None:
    """Add one row a shape and contestant."""
    heads = str(MAIN_HEADS)
    for shape in SHAPES:
        batch = PagedBatch.decode(arena, MAIN_HEADS, DECODE_SHAPES[shape])
        samples = attention(report, "layer", shape, batch, contestants, rounds=rounds)
        for name, sample in samples.items():
            report.add("layer", heads, shape, name, sample)
        report.save()
        log(f"layer {heads} {shape}: {report.line('layer', heads, shape)}")
