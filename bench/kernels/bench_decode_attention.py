"""Decode: one query a sequence over paged KV. Bound by the bytes of K and V."""

from __future__ import annotations

from collections.abc import Callable

from bench.kernels.arena import Arena, PagedBatch
from bench.kernels.contest import attention
from bench.kernels.impls import Contestant, floor
from bench.kernels.report import Report
from bench.kernels.shapes import DECODE_SHAPES, Heads, kv_bytes

__all__ = ["run"]


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
    """Add one row a shape and contestant, and the floor of each shape.

    A row's rate counts the bytes that its own storage holds: half as many for fp8.
    """
    for shape in shapes:
        lengths = DECODE_SHAPES[shape]
        num_bytes = kv_bytes(lengths, heads.kv)
        floors = floor.reads(arena, num_bytes)
        batch = PagedBatch.decode(arena, heads, lengths)
        samples = attention(
            report, "decode", shape, batch, contestants, rounds=rounds, others=floors
        )
        best = min(
            (sample for name, sample in samples.items() if name in floors),
            key=lambda sample: sample.median,
        )
        report.add("decode", str(heads), shape, floor.NAME, best, num_bytes=num_bytes)
        for contestant in contestants:
            if contestant.name in samples:
                report.add(
                    "decode",
                    str(heads),
                    shape,
                    contestant.name,
                    samples[contestant.name],
                    num_bytes=num_bytes * contestant.element_bytes // 2,
                )
        report.save()
        log(f"decode {heads} {shape}: {report.line('decode', str(heads), shape)}")
