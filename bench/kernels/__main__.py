"""All kernel benchmarks in one run: one table on the console, one JSON file.

``python -m bench.kernels --out bench/results/kernels-h200.json`` (or ``make bench-kernels``).
The file is rewritten after every shape. Peers that are not installed are listed in
``meta.missing``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.kernels import (
    bench_decode_attention,
    bench_launch,
    bench_layer,
    bench_mla_decode,
    bench_prefill_attention,
    bench_sm80,
    bench_store_kv,
    check,
    machine,
)
from bench.kernels.arena import Arena
from bench.kernels.impls import Contestant, Registry, load
from bench.kernels.report import Report, markdown_table
from bench.kernels.shapes import (
    DECODE_SHAPES,
    HEADS,
    LATENT_HEADS,
    MAIN_HEADS,
    PREFILL_SHAPES,
)

SECTIONS = ("check", "decode", "layer", "prefill", "store", "launch", "mla", "sm80")
_ARENA_BYTES = 18 << 30
_STARTED = time.monotonic()


def _log(text: str) -> None:
    print(f"[{time.monotonic() - _STARTED:6.1f}] {text}", flush=True)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("bench/results/kernels-h200.json"))
    parser.add_argument("--rounds", type=int, default=11, help="measurements of each number")
    parser.add_argument(
        "--sections", nargs="+", choices=SECTIONS, default=SECTIONS, metavar="SECTION"
    )
    parser.add_argument("--commit", help="of the sources, where there is no repository to ask")
    parser.add_argument("--heads", nargs="+", default=[str(heads) for heads in HEADS])
    parser.add_argument("--decode-shapes", nargs="+", default=list(DECODE_SHAPES))
    parser.add_argument("--prefill-shapes", nargs="+", default=list(PREFILL_SHAPES))
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _arguments(arguments)
    if not torch.cuda.is_available():
        print("the kernel benchmarks need a CUDA device", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    registry = load()
    report = Report(options.out, machine.describe(registry.versions, options.commit))
    report.meta["missing"] = registry.missing
    _log(f"contestants: {[c.name for c in registry.decode]}; missing: {registry.missing}")
    arena = Arena(_ARENA_BYTES)
    if "check" in options.sections:
        _check(report, arena, registry.decode, registry.prefill, registry.mla)
    heads = [h for h in HEADS if str(h) in options.heads]
    with torch.inference_mode():
        for section in options.sections:
            _run(section, report, arena, registry, heads, options)
    report.meta["card_after"] = machine.card_state()
    report.save()
    for op, count in (("decode", heads), ("prefill", [MAIN_HEADS]), ("mla", [LATENT_HEADS])):
        for number in count:
            print(f"\n{op} {number}, us\n\n{markdown_table(report.rows, op, str(number))}")
    return 0


def _check(
    report: Report,
    arena: Arena,
    decode: list[Contestant],
    prefill: list[Contestant],
    mla: list[Contestant],
) -> None:
    """Check contestants against the reference; those that fail leave the lists."""
    for op, contestants, error_of, heads in (
        ("decode", decode, check.decode_error, MAIN_HEADS),
        ("prefill", prefill, check.prefill_error, MAIN_HEADS),
        ("mla", mla, check.mla_error, LATENT_HEADS),
    ):
        right: list[Contestant] = []
        for contestant in contestants:
            cell = f"{op} {contestant.name}"
            try:
                error = error_of(contestant, arena, heads)
            except Exception as failure:
                report.skip(cell, f"check failed: {type(failure).__name__}: {failure}")
                _log(f"check {cell}: {failure}")
                continue
            report.meta["checks"][cell] = error
            _log(f"check {cell}: relative error {error:.1e}")
            if error <= check.TOLERANCE:
                right.append(contestant)
            else:
                report.skip(cell, f"wrong answer: relative error {error:.2e}")
        contestants[:] = right
    report.save()


def _run(
    section: str,
    report: Report,
    arena: Arena,
    registry: Registry,
    heads: list,
    options: argparse.Namespace,
) -> None:
    if section == "decode":
        for number in heads:
            bench_decode_attention.run(
                report,
                arena,
                registry.decode,
                number,
                rounds=options.rounds,
                shapes=options.decode_shapes,
                log=_log,
            )
    elif section == "layer":
        bench_layer.run(report, arena, registry.layer, rounds=options.rounds, log=_log)
    elif section == "prefill":
        bench_prefill_attention.run(
            report,
            arena,
            registry.prefill,
            MAIN_HEADS,
            rounds=options.rounds,
            shapes=options.prefill_shapes,
            log=_log,
        )
    elif section == "store" and registry.store is not None:
        bench_store_kv.run(report, arena, registry.store, rounds=options.rounds, log=_log)
    elif section == "launch":
        bench_launch.run(report, arena, registry, log=_log)
    elif section == "mla":
        bench_mla_decode.run(
            report,
            arena,
            registry.mla,
            rounds=options.rounds,
            shapes=options.decode_shapes,
            log=_log,
        )
    elif section == "sm80":
        older = registry.sm80_decode, registry.sm80_prefill
        _check(report, arena, *older, [])
        bench_sm80.run(report, arena, *older, rounds=options.rounds, log=_log)


if __name__ == "__main__":
    sys.exit(main())
