"""Reuse on a GPU: what it costs and what it saves, with an 8B-shaped Llama of random weights.

    python -m bench.serving [--parts sharing,host,misses,reordering,side] [--out FILE]

``--device cpu --shape small`` tries it out where there is no GPU; such numbers mean nothing.
Parts: :mod:`bench.serving.reordering`, :mod:`bench.serving.side_stream`,
:mod:`bench.serving.host_hits`, :mod:`bench.serving.reuse`.
With ``--keep FILE`` the rows of other parts stay as they are there, each with the run it is of.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from bench.record import machine, save
from bench.serving import reordering, reuse
from bench.serving.host_hits import host_rows
from bench.serving.random_model import SHAPES, random_llama
from bench.serving.side_stream import side_stream_rows
from bench.serving.steps import StepShape
from bicl.frontends.http.engine import Engine, EngineConfig
from bicl.frontends.http.engine import engine as engine_module
from bicl.frontends.http.loader import LoadedModel

RESULT = Path("bench/results/reuse-h200.json")
Row = dict[str, Any]


@contextmanager
def running(loaded: LoadedModel, **options: Any) -> Iterator[Engine]:
    gc.collect()  # what an engine before this one left
    engine = Engine(loaded, EngineConfig(max_waiting=100_000, **options)).start()
    gc.freeze()  # as the server does once it has started
    try:
        yield engine
    finally:
        engine.stop()
        gc.unfreeze()
        if loaded.device.type == "cuda":
            torch.cuda.empty_cache()


def reordering_part(loaded: LoadedModel, options: argparse.Namespace) -> Iterator[Row]:
    """100 requests a second of a chat's lengths, and of lengths that one card can follow."""
    with running(
        loaded,
        max_total_tokens=4864,
        max_batch_size=options.batch,
        max_batch_prefill_tokens=4096,
        num_pages=options.pages,
    ) as engine:
        yield from reordering.traffic_rows(
            engine, rate=options.rate, seconds=options.seconds, shrinks=(8, 1)
        )
        shapes = [(1, 1024), (32, 1024), (32, 4096), (options.batch, 1024)]
        fitting = [(b, k) for b, k in shapes if b * k // 64 <= options.pages]
        yield from reordering.decode_rows(engine, fitting, rounds=2 * options.rounds)
        shapes = [(1, 2048), (1, 4096)]
        yield from reordering.prefill_rows(engine, shapes, rounds=4 * options.rounds)


def side_part(loaded: LoadedModel, options: argparse.Namespace) -> Iterator[Row]:
    """Stores on a side stream; only a GPU has one."""
    if not options.device.startswith("cuda"):
        return
    shapes = [(1, 1024), (1, 16384), (8, 4096), (32, 1024), (32, 4096), (64, 1024), (128, 1024)]
    steps = [StepShape((1,) * batch, (context - 1,) * batch) for batch, context in shapes]
    steps += [StepShape((2048,), (0,))]
    sizes = {"max_batch_size": 1, "max_total_tokens": 4864, "num_pages": 2048}
    with running(loaded, cuda_graphs=False, max_batch_prefill_tokens=2048, **sizes) as engine:
        yield from side_stream_rows(engine, steps, rounds=options.rounds)


def misses_part(loaded: LoadedModel, options: argparse.Namespace) -> Iterator[Row]:
    """Without an index; with one; and as on a GPU by default, with the host tier below it."""
    engine_module.IDLE_SECONDS = 3600.0  # engines check their books in pauses: another one's turn
    variants: dict[str, dict[str, Any]] = {
        "off": {"prefix_caching": False},
        "index": {},
        "index and host tier": {"host_cache_bytes": options.host_bytes // 4},
    }
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(
                running(
                    loaded,
                    max_total_tokens=1024,
                    max_batch_size=64,
                    max_batch_prefill_tokens=4096,
                    num_pages=1024,
                    **more,
                )
            )
            for name, more in variants.items()
        }
        yield from reuse.no_hit_rows(
            engines, requests=64, prompt=512, reply=32, rounds=2 * options.rounds
        )


def host_part(loaded: LoadedModel, options: argparse.Namespace) -> Iterator[Row]:
    sizes: dict[str, Any] = {
        "max_total_tokens": 8448,
        "max_batch_size": 2,
        "max_batch_prefill_tokens": 8448,
        "num_pages": 129,  # for one prompt: the other leaves nothing behind
    }
    with (
        running(loaded, host_cache_bytes=options.host_bytes, **sizes) as engine,
        running(loaded, prefix_caching=False, **sizes) as plain,
    ):
        yield from host_rows(engine, plain, prefix=8192, suffix=32, rounds=options.rounds)


def sharing_part(loaded: LoadedModel, options: argparse.Namespace) -> Iterator[Row]:
    with running(
        loaded, max_total_tokens=4864, max_batch_size=16, max_batch_prefill_tokens=4096,
        num_pages=1024,
    ) as engine:  # fmt: skip
        yield reuse.three_turns_row(engine, message=300, reply=40)
        yield reuse.in_flight_row(engine, requests=16, prefix=4096, suffix=32)


def rows_of_run(path: Path) -> list[Row]:
    """Rows of an earlier result, each with the run that it is of."""
    result = json.loads(path.read_text())
    run = {name: result["meta"][name] for name in ("date", "commit", "sources", "command")}
    return [{"run": run, **row} for row in result["rows"]]


PARTS: dict[str, Callable[[LoadedModel, argparse.Namespace], Iterator[Row]]] = {
    "sharing": sharing_part,
    "host": host_part,
    "misses": misses_part,
    "reordering": reordering_part,
    "side": side_part,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="8b", choices=SHAPES)
    parser.add_argument("--rate", type=float, default=100.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each traffic")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--pages", type=int, default=6000)
    parser.add_argument("--host-bytes", type=int, default=4 << 30, help="of the host tier")
    parser.add_argument("--keep", type=Path, help="an earlier result, for the parts left out")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    dtype = torch.bfloat16 if options.device.startswith("cuda") else torch.float32
    loaded = random_llama(options.shape, options.device, dtype)
    rows: list[Row] = []
    earlier = rows_of_run(options.keep) if options.keep else []
    meta = machine(shape=options.shape, dtype=str(dtype))
    for part in options.parts.split(","):
        for row in PARTS[part](loaded, options):
            shown = {k: v for k, v in row.items() if k not in ("case", "value", "unit")}
            value = f"{row['value']:.5f} {row['unit']}" if "value" in row else "not seen"
            print(f"{row['case']}: {value} {shown}", flush=True)
            rows.append(row)
            cases = {each["case"] for each in rows}
            kept = [each for each in earlier if each["case"] not in cases]
            save(options.out, meta, rows + kept)
    return 0


if __name__ == "__main__":
    sys.exit(main())
