"""Print the README's tables from the result files and say which targets are met.

``python -m bench.summary [bench/results/kernels-h200.json]``; exits 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.kernels.machine import sources, sources_at
from bench.kernels.report import find, load_report
from bench.kernels.shapes import (
    DECODE_SHAPES,
    HEADS,
    LATENT_HEADS,
    MAIN_HEADS,
    MLA_SHAPES,
    PREFILL_SHAPES,
)
from bench.targets import best_peer, fastest, verdicts

__all__ = ["decode_table", "main", "mla_table", "prefill_table", "small_table"]

DEFAULT = Path("bench/results/kernels-h200.json")
Rows = Sequence[Mapping[str, Any]]


def _cell(us: float | None, digits: int = 1) -> str:
    return "-" if us is None else f"{us:.{digits}f}"


def _over(top: float | None, bottom: float | None) -> str:
    return "-" if top is None or bottom is None else f"{top / bottom:.2f}"


def decode_table(rows: Rows, heads: str) -> str:
    """Decode of one head count: floor, ours, the best paged peer, TGI's default, in us."""
    lines = [
        "| batch x context | floor | **BICL** | / floor | best paged peer | / peer "
        "| TGI's default | / TGI | deterministic | fp8 KV |",
        "|---|---:|---:|---:|---|---:|---:|---:|---:|---:|",
    ]
    for shape in DECODE_SHAPES:
        floor, ours, default, fixed, half = (
            find(rows, "decode", heads, shape, impl)
            for impl in (
                "floor",
                "bicl",
                "flashinfer-p1",
                "bicl-deterministic",
                "bicl-fp8",
            )
        )
        peer = best_peer(rows, "decode", heads, shape)
        name = f"{peer[1]:.1f} ({peer[0]})" if peer else "-"
        lines.append(
            f"| {shape} | {_cell(floor)} | **{_cell(ours)}** | {_over(ours, floor)} | {name} "
            f"| {_over(ours, peer[1] if peer else None)} | {_cell(default)} "
            f"| {_over(ours, default)} | {_cell(fixed)} | {_cell(half)} |"
        )
    return "\n".join(lines)


def prefill_table(rows: Rows, heads: str) -> str:
    """Prefill of one head count in us, with the speed against FlashAttention 3."""
    lines = [
        "| new + cached tokens | **BICL** | TFLOP/s | FA3, 128-token pages | BICL is "
        "| FA3, 64-token pages | BICL is | TGI's default | BICL is | fp8 pages |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for shape in PREFILL_SHAPES:
        ours = find(rows, "prefill", heads, shape, "bicl")
        theirs = (
            fastest(rows, "prefill", heads, shape, impls)
            for impls in (
                ("fa3-p128", "fa3-p128-sched"),
                ("fa3-p64", "fa3-p64-sched"),
                ("flashinfer-p1",),
            )
        )
        rate = next(
            (
                row["tflops"]
                for row in rows
                if (row["op"], row["heads"], row["shape"], row["impl"])
                == ("prefill", heads, shape, "bicl")
            ),
            None,
        )
        cells = " | ".join(f"{_cell(us, 0)} | {_over(us, ours)}x" for us in theirs)
        half = find(rows, "prefill", heads, shape, "bicl-fp8")
        lines.append(
            f"| {shape} | **{_cell(ours, 0)}** | {_cell(rate, 0)} | {cells} | {_cell(half, 0)} |"
        )
    return "\n".join(lines)


def mla_table(rows: Rows) -> str:
    """Decode over latents in us; empty but for its head where it was not measured."""
    lines = [
        "| batch x context | floor | **BICL** | / floor | launched early | FlashMLA | / FlashMLA |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for shape in MLA_SHAPES:
        floor, ours, early, peer = (
            find(rows, "mla", str(LATENT_HEADS), shape, impl)
            for impl in ("floor", "bicl", "bicl-pdl", "flashmla-p64")
        )
        if ours is not None:
            lines.append(
                f"| {shape} | {_cell(floor)} | **{_cell(ours)}** | {_over(ours, floor)} "
                f"| {_cell(early)} | {_cell(peer)} | {_over(ours, peer)} |"
            )
    return "\n".join(lines)


def small_table(rows: Rows) -> str:
    """Store, launch and plan costs in us."""
    lines = ["| operation | shape | implementation | us |", "|---|---|---|---:|"]
    for row in rows:
        if row["op"] in ("store", "layer", "launch", "plan"):
            lines.append(
                f"| {row['op']} | {row['shape']} | {row['impl']} | {_cell(row['us'], 2)} |"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", nargs="?", type=Path, default=DEFAULT)
    path = parser.parse_args(arguments).report
    document = load_report(path)
    rows, meta = document["rows"], document["meta"]
    print(f"Measured on {meta.get('card')}, {meta.get('date')}, commit {meta.get('commit')}")
    measured = meta.get("sources") or sources_at(str(meta.get("commit"))) or {}
    same = measured.get("csrc") == sources()["csrc"]
    print(f"The kernels of this tree are {'' if same else 'not '}known to be those measured\n")
    for heads in map(str, HEADS):
        print(f"### Decode, {heads} heads, head_dim 128, bf16: microseconds\n")
        print(decode_table(rows, heads) + "\n")
    print(f"### Prefill, {MAIN_HEADS} heads, causal: microseconds\n")
    print(prefill_table(rows, str(MAIN_HEADS)) + "\n")
    print("### Decode over latents (MLA), 16 heads, bf16: microseconds\n")
    print(mla_table(rows) + "\n")
    print("### Small operations\n")
    print(small_table(rows) + "\n")
    results = verdicts(rows)
    print("### Targets\n")
    print("\n".join(map(str, results)))
    promised = [verdict for verdict in results if verdict.limit is not None]
    print(f"\n{sum(verdict.passed for verdict in promised)} of {len(promised)} targets met")
    return 0 if all(verdict.passed for verdict in results) else 1


if __name__ == "__main__":
    sys.exit(main())
