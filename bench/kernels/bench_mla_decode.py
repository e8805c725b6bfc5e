"""Decode over latents (MLA): one query a sequence over 576 elements a token, read once."""

from __future__ import annotations

from collections.abc import Callable

from bench.kernels.arena import Arena, LatentBatch
from bench.kernels.contest import attention
from bench.kernels.impls import Contestant, floor
from bench.kernels.report import Report
from bench.kernels.shapes import DECODE_SHAPES, LATENT_HEADS, MLA_SHAPES, latent_bytes

__all__ = ["run"]


def run(
    report: Report,
    arena: Arena,
    contestants: list[Contestant],
    *,
    rounds: int,
    shapes: list[str],
    log: Callable[[str], None],
) -> None:
    """Add one row a shape and contestant, and the floor of each shape."""
    heads = LATENT_HEADS
    for shape in MLA_SHAPES:
        if shape not in shapes:
            continue
        lengths = DECODE_SHAPES[shape]
        num_bytes = latent_bytes(lengths)
        floors = floor.reads(arena, num_bytes)
        batch = LatentBatch.decode(arena, heads, lengths)
        samples = attention(report, "mla", shape, batch, contestants, rounds=rounds, others=floors)
        best = min(
            (sample for name, sample in samples.items() if name in floors),
            key=lambda sample: sample.median,
        )
        report.add("mla", str(heads), shape, floor.NAME, best, num_bytes=num_bytes)
        for name in (contestant.name for contestant in contestants):
            if name in samples:
                report.add("mla", str(heads), shape, name, samples[name], num_bytes=num_bytes)
        report.save()
        log(f"mla {heads} {shape}: {report.line('mla', str(heads), shape)}")
