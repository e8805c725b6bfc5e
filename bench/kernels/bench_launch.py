"""Host time to issue work eagerly: launches against ``torch.add``, and one plan a step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from bench.kernels.arena import Arena, PagedBatch
from bench.kernels.impls import Registry
from bench.kernels.report import Report
from bench.kernels.shapes import DECODE_SHAPES, MAIN_HEADS
from bench.timing import Call, host_cost

__all__ = ["run"]

_SHAPE = "8x4096"


def run(report: Report, arena: Arena, registry: Registry, *, log: Callable[[str], None]) -> None:
    """Add rows of ``op`` ``launch`` and ``plan``; a shape that no device work can hide."""
    batch = PagedBatch(arena, MAIN_HEADS, DECODE_SHAPES[_SHAPE], (1,) * 8, rotations=1)
    small = torch.ones(64, device=arena.device)
    launches: dict[str, Call] = {"torch.add": partial(torch.add, small, small, out=small)}
    for op, factories, calls in (
        ("launch", registry.launch, launches),
        ("plan", registry.plan, {}),
    ):
        for name, factory in factories.items():
            try:
                calls[name] = factory(batch)
                calls[name]()
            except Exception as error:
                calls.pop(name, None)
                report.skip(f"{op} {name}", f"{type(error).__name__}: {error}")
        for name, sample in host_cost(calls).items():
            report.add(op, str(MAIN_HEADS), "eager", name, sample)
        log(f"{op}: {report.line(op, str(MAIN_HEADS), 'eager')}")
    report.save()
