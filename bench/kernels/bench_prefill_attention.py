"""Prefill: new tokens, whole prompts or chunks on a cached prefix. Bound by arithmetic."""

from __future__ import annotations

from collections.abc import Callable

from bench.kernels.arena import Arena, PagedBatch
from bench.kernels.contest import attention
from bench.kernels.impls import Contestant
from bench.kernels.report import Report
from bench.kernels.shapes import PREFILL_SHAPES, Heads, prefill_flops

__all__ = ["run"]

_ROUNDS = 4
"""Times as many as of other operators: at its power cap a card runs at two speeds, 4 % apart."""


def run(
    report: Report,
    arena: Arena,
    contestants: list[Contestant],
    heads: Heads,
    *,
    rounds: int,
    shapes: list[str],
    log: Callable[[str], None],
) -> None:
    """Add one row a shape and contestant."""
    for shape in shapes:
        batch = PagedBatch.prefill(arena, heads, PREFILL_SHAPES[shape])
        flops = prefill_flops(PREFILL_SHAPES[shape], heads.query)
        samples = attention(report, "prefill", shape, batch, contestants, rounds=_ROUNDS * rounds)
        for name, sample in samples.items():
            report.add("prefill", str(heads), shape, name, sample, flops=flops)
        report.save()
        log(f"prefill {heads} {shape}: {report.line('prefill', str(heads), shape)}")
