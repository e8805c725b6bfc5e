"""Products with the few rows of a decode step: ours against cuBLAS, each alone and in a layer.

    python -m bench.kernels.linear --out bench/results/linear-h200.json

Shapes of an 8B model in bf16, in replayed CUDA graphs, weights cold, contestants in turns.
``product`` is one product after the other; ``layer`` all four of a layer with its norms and its
activation between them, as the embedded server runs them, without attention. ``floor_us`` is what
reading the weights takes at the memory's rate.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from bench.record import machine, save
from bench.timing import Sample, compare, num_rotations
from bicl.ops.cpu import linear as torchs
from bicl.ops.cuda import library
from bicl.ops.cuda.linear import MAX_ROWS
from bicl.ops.cuda.rms_norm import rms_norm
from bicl.ops.cuda.swiglu import swiglu

HIDDEN, HEADS, MLP = 4096, 4096 + 2 * 1024, 14336
PRODUCTS = {  # outputs, depth, whether added to what is there
    "qkv": (HEADS, HIDDEN, False),
    "o": (HIDDEN, HIDDEN, True),
    "gate_up": (2 * MLP, HIDDEN, False),
    "down": (HIDDEN, MLP, True),
}
ROWS = (1, 2, 4, 8, 12, 16)
ROOM = 4 << 30
DRAM_BYTES_PER_US = 4.55e6


def _linear(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Ours at any of ``ROWS``; the operator leaves more than ``MAX_ROWS`` to cuBLAS."""
    out = torch.empty((len(rows), len(weight)), dtype=rows.dtype, device=rows.device)
    library.module().few_rows_linear(out, rows, weight, None, False, True)
    return out


def _add_linear(target: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor) -> None:
    library.module().few_rows_linear(target, rows, weight, None, True, True)


FORMS: dict[str, Any] = {
    "bicl": SimpleNamespace(linear=_linear, add_linear=_add_linear),
    "cublas": torchs,
}


def weights_of(name: str, copies: int) -> list[torch.Tensor]:
    outputs, depth, _ = PRODUCTS[name]
    shape = (copies, outputs, depth)
    values = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(std=depth**-0.5)
    return list(values)


def product_rows(rounds: int) -> Iterator[dict[str, Any]]:
    """Each product alone."""
    for name, (outputs, depth, add) in PRODUCTS.items():
        weight_bytes = 2 * outputs * depth
        weights = weights_of(name, num_rotations(weight_bytes, ROOM))
        for rows in ROWS:
            x = torch.randn(rows, depth, device="cuda").bfloat16()
            out = torch.zeros(rows, outputs, device="cuda").bfloat16()
            calls = {
                form: [
                    partial(ops.add_linear, out, x, w) if add else partial(ops.linear, x, w)
                    for w in weights
                ]
                for form, ops in FORMS.items()
            }
            yield _row("product", name, rows, calls, weight_bytes, rounds)


def layer_rows(rounds: int) -> Iterator[dict[str, Any]]:
    """All products of a layer in their places."""
    weight_bytes = sum(2 * outputs * depth for outputs, depth, _ in PRODUCTS.values())
    copies = num_rotations(weight_bytes, ROOM)
    layers = list(zip(*(weights_of(name, copies) for name in PRODUCTS), strict=True))
    norm = torch.ones(HIDDEN, dtype=torch.bfloat16, device="cuda")

    def layer(ops: Any, hidden: torch.Tensor, weights: Sequence[torch.Tensor]) -> None:
        qkv, o, gate_up, down = weights
        query = ops.linear(rms_norm(hidden, norm, 1e-5), qkv)[:, :HIDDEN]
        ops.add_linear(hidden, query, o)
        gated = swiglu(ops.linear(rms_norm(hidden, norm, 1e-5), gate_up))
        ops.add_linear(hidden, gated, down)

    for rows in ROWS:
        calls = {}
        for form, ops in FORMS.items():
            hidden = torch.randn(rows, HIDDEN, device="cuda").bfloat16()
            calls[form] = [partial(layer, ops, hidden, weights) for weights in layers]
        yield _row("layer", "qkv, o, gate_up, down", rows, calls, weight_bytes, rounds)


def _row(
    section: str, name: str, rows: int, calls: dict[str, Any], weight_bytes: int, rounds: int
) -> dict[str, Any]:
    comparison = compare(calls, rounds=rounds, graph_us=2000.0)
    if comparison.errors:
        raise RuntimeError(f"{section} {name}, {rows} rows: {comparison.errors}")
    samples: dict[str, Sample] = comparison.samples
    us = {form: sample.median for form, sample in samples.items()}
    return {
        "section": section,
        "products": name,
        "rows": rows,
        "used": rows <= MAX_ROWS,
        "us": us,
        "spread": {form: [sample.p20, sample.p80] for form, sample in samples.items()},
        "floor_us": weight_bytes / DRAM_BYTES_PER_US,
        "of_cublas": us["bicl"] / us["cublas"],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("bench/results/linear-h200.json"))
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device", file=sys.stderr)
        return 2
    meta, found = machine(), []
    for rows in (*product_rows(options.rounds), *layer_rows(options.rounds)):
        found.append(rows)
        print(_line(rows), flush=True)
    used = [row["of_cublas"] for row in found if row["used"]]
    print(f"where it is used: {math.exp(sum(map(math.log, used)) / len(used)):.3f} of cuBLAS")
    save(options.out, meta, found)
    return 0


def _line(row: dict[str, Any]) -> str:
    times = ", ".join(f"{form} {us:.1f}" for form, us in row["us"].items())
    name = f"{row['section']} {row['products']}, {row['rows']} rows"
    return f"{name}: {times} us (floor {row['floor_us']:.1f}); {row['of_cublas']:.3f} of cuBLAS"


if __name__ == "__main__":
    raise SystemExit(main())
