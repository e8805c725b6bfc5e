"""One batch, all contestants: prepare, time in turns, note who could not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.kernels.arena import PagedBatch
from bench.kernels.impls import Contestant, Prepared
from bench.kernels.report import Report
from bench.timing import Call, Sample, compare

__all__ = ["attention"]


def attention(
    report: Report,
    op: str,
    shape: str,
    batch: PagedBatch,
    contestants: Sequence[Contestant],
    *,
    rounds: int,
    others: Mapping[str, Sequence[Call]] | None = None,
) -> dict[str, Sample]:
    """Samples by name, of ``contestants`` and of ``others``, in one interleaved comparison.

    A contestant that refuses or fails becomes an entry of ``meta.skipped`` with its reason.
    """
    cell = f"{op} {batch.heads} {shape}"
    calls: dict[str, Sequence[Call]] = {}
    keep: list[Prepared] = []
    for contestant in contestants:
        try:
            prepared = contestant.prepare(batch)
        except Exception as error:
            report.skip(f"{cell} {contestant.name}", f"{type(error).__name__}: {error}")
            continue
        calls[contestant.name] = prepared.calls
        keep.append(prepared)

    def settle() -> None:
        for prepared in keep:
            prepared.settle()

    found = compare({**calls, **(others or {})}, rounds=rounds, captured=settle)
    for name, reason in found.errors.items():
        report.skip(f"{cell} {name}", reason)
    return found.samples
