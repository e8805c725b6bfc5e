"""One layer's cache update and attention on the CPU, against torch on contiguous K and V.

    python -m bench.cpu.bench_attention [--threads N] [--rounds N] [--output FILE]

Contestants, timed in turns:

* ``bicl``: ``store`` of the step's tokens, then ``run`` over scattered pages; ``plan`` is outside,
  once a step and not once a layer, and has its own column.
* ``cat+sdpa``: what transformers does with its ``DynamicCache``: ``torch.cat`` of the step's K and
  V to a contiguous cache, then ``scaled_dot_product_attention`` with grouped heads (a batch of
  unequal lengths is padded and masked, as ``generate`` does it).
* ``sdpa``: the attention alone, on K and V that lie ready.

Medians in microseconds, with 20th and 80th percentiles in the JSON file.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch.nn import functional as F

from bench.record import machine, save
from bench.timing import Sample, summarise
from bicl.attention.cpu import CpuBackend
from bicl.attention.metadata import AttentionMetadata
from bicl.attention.pool import KVPool
from bicl.cache.layout import PageLayout

# num_q_heads, num_kv_heads, head_dim: SmolLM2-135M and an 8B Llama's layer.
HEADS = {"9/3 d64": (9, 3, 64), "32/8 d128": (32, 8, 128)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# (queries, keys) a sequence.
STEPS: dict[str, list[tuple[int, int]]] = {
    "decode 1x16": [(1, 16)],
    "decode 1x130": [(1, 130)],
    "decode 1x1000": [(1, 1000)],
    "decode 1x4000": [(1, 4000)],
    "decode 8x130": [(1, 130)] * 8,
    "decode 8x1000": [(1, 1000)] * 8,
    "decode 8x1000 + 8000": [(1, 1000)] * 8 + [(1, 8000)],
    "prefill 250": [(250, 250)],
    "prefill 1000": [(1000, 1000)],
    "extend 8 on 1000": [(8, 1008)],
    "extend 256 on 1000": [(256, 1256)],
}


def contestants(
    lengths: list[tuple[int, int]], heads: tuple[int, int, int], dtype: torch.dtype
) -> dict[str, Callable[[], object]]:
    """Callables over the same lengths; memory of their own."""
    num_q_heads, num_kv_heads, head_dim = heads
    scale = head_dim**-0.5
    layout = PageLayout(num_kv_heads, head_dim, dtype, swizzle=False)
    pages = [layout.pages_for(keys) for _, keys in lengths]
    pool = KVPool([layout], sum(pages), "cpu", fill=0.1)
    order = torch.randperm(sum(pages)).split(pages)
    table = torch.zeros(len(lengths), max(pages), dtype=torch.int32)
    slots = []
    for row, ((queries, keys), own) in enumerate(zip(lengths, order, strict=True)):
        table[row, : len(own)] = own
        token = torch.arange(keys - queries, keys)
        slots.append(own[token // 64] * 64 + token % 64)
    rows = [queries for queries, _ in lengths]
    meta = AttentionMetadata(
        table,
        torch.tensor([keys for _, keys in lengths], dtype=torch.int32),
        torch.tensor([0, *rows]).cumsum(0).to(torch.int32),
        torch.cat(slots),
        max(rows),
        max(keys for _, keys in lengths),
    )
    total = sum(rows)
    query = torch.randn(total, num_q_heads, head_dim).to(dtype)
    key, value = torch.randn(2, total, num_kv_heads, head_dim).to(dtype)
    backend = CpuBackend()

    def bicl() -> object:
        backend.store(pool.layers[0], key, value, meta.slot_mapping)
        return backend.run(query, pool.layers[0], meta, scale=scale)

    def plan() -> object:
        backend.plan(meta)
        return bicl()

    cat, attend = _torch(lengths, heads, dtype)
    backend.plan(meta)
    return {"bicl": bicl, "cat+sdpa": cat, "sdpa": attend, "bicl+plan": plan}


def _torch(
    lengths: list[tuple[int, int]], heads: tuple[int, int, int], dtype: torch.dtype
) -> tuple[Callable[[], object], Callable[[], object]]:
    num_q_heads, num_kv_heads, head_dim = heads
    queries, longest = lengths[0][0], max(keys for _, keys in lengths)
    batch = len(lengths)
    past = torch.randn(2, batch, num_kv_heads, longest - queries, head_dim).to(dtype)
    new = torch.randn(2, batch, num_kv_heads, queries, head_dim).to(dtype)
    query = torch.randn(batch, num_q_heads, queries, head_dim).to(dtype)
    ready = torch.cat((past, new), dim=3)
    mask = None
    if len(set(lengths)) > 1 or 1 < queries < longest:
        keys = torch.tensor([k for _, k in lengths])[:, None, None, None]
        position = keys - queries + torch.arange(queries)[None, None, :, None]
        mask = torch.arange(longest) <= position
    options = {
        "scale": head_dim**-0.5,
        "enable_gqa": True,
        "attn_mask": mask,
        "is_causal": mask is None and queries > 1,
    }

    def attend() -> object:
        return F.scaled_dot_product_attention(query, ready[0], ready[1], **options)

    def cat() -> object:
        key = torch.cat((past[0], new[0]), dim=2)
        value = torch.cat((past[1], new[1]), dim=2)
        return F.scaled_dot_product_attention(query, key, value, **options)

    return cat, attend


def measure(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, Sample]:
    """Microseconds a call; contestants take turns, every second round backwards."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 3):
        names = list(calls) if number % 2 else list(reversed(calls))
        for name in names:
            start = time.perf_counter_ns()
            calls[name]()
            if number >= 3:
                times[name].append((time.perf_counter_ns() - start) / 1000)
    return {name: summarise(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    rows = []
    print(f"{'heads':10}{'dtype':6}{'step':22}{'bicl':>9}{'cat+sdpa':>10}{'sdpa':>9}{'ratio':>7}"
          f"{'plan':>8}")  # fmt: skip
    for head_name, heads in HEADS.items():
        for dtype_name, dtype in DTYPES.items():
            for step, lengths in STEPS.items():
                samples = measure(contestants(lengths, heads, dtype), arguments.rounds)
                us = {name: sample.median for name, sample in samples.items()}
                print(
                    f"{head_name:10}{dtype_name:6}{step:22}{us['bicl']:9.0f}{us['cat+sdpa']:10.0f}"
                    f"{us['sdpa']:9.0f}{us['bicl'] / us['cat+sdpa']:7.2f}"
                    f"{us['bicl+plan'] - us['bicl']:8.0f}",
                    flush=True,
                )
                rows += [
                    {
                        "heads": head_name,
                        "dtype": dtype_name,
                        "step": step,
                        "impl": name,
                        "us": sample.median,
                        "us_p20": sample.p20,
                        "us_p80": sample.p80,
                    }
                    for name, sample in samples.items()
                ]
    if arguments.output:
        meta = machine(threads=arguments.threads, rounds=arguments.rounds)
        save(arguments.output, meta, rows)


if __name__ == "__main__":
    main()
