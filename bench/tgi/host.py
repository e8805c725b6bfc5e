"""Host time of a decode step in TGI's real shard that no graph hides, on a CPU, without a GPU.

Runs in an environment with TGI's Python server::

    python -m bench.tgi.host --out bench/results/tgi-host-cpu.json

The model is pretended: its logits are there at once, and the first thing that waits for them waits
``--graph-us`` from then on, as for a captured graph. A row is what a step takes beyond that: TGI's
own Python and what each cache adds, before the launch and after the graph, and under it as far as
it takes longer. Not in it: what only runs with a GPU (launches, the entry into the graph,
FlashInfer's plan). The shards take turns; on a busy machine compare only rows of one run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.record import save
from bench.tgi import step
from bench.tgi.step import IMPLS, ROOT, Words, describe
from bicl.frontends.tgi.selftest.router import Router, Sequence
from bicl.frontends.tgi.selftest.shard import Shards, start_environment

VOCAB_SIZE = 2000  # small: a CPU chooses the next tokens
WORDS = Words(VOCAB_SIZE)
SHARD = Path(__file__).parent / "host_shard"
ROUNDS, WARM_STEPS, STEPS = 16, 2, 8
PREFILL_TOKENS = 4096
FREE_BYTES = 300 << 20
TINY = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": VOCAB_SIZE,
}
STOCK = {"BICL_DISABLE": "1", "ATTENTION": "flashdecoding-ipex"}
SHARDS = {
    "tgi": STOCK,
    **{name: IMPLS[name][0] for name in ("bicl", "bicl-checked")},
    "bicl-host-cache": {"BICL_HOST_CACHE_SIZE": "1GiB"},
}
"""What differs between them. ``tgi``: without our modules; ``bicl``: claims of cached prefixes are
not checked; ``bicl-checked``: they are; ``bicl-host-cache``: and pages are kept in host memory."""


def write_model(path: Path) -> None:
    """A Llama of two small layers that is loaded and never run."""
    step.write_model(path, TINY)
    width, inner = TINY["hidden_size"], TINY["intermediate_size"]
    shapes = {"embed_tokens": (VOCAB_SIZE, width), "norm": (width,)}
    for i in range(TINY["num_hidden_layers"]):
        layer = {f"self_attn.{name}_proj": (width, width) for name in "qkvo"}
        layer |= {f"mlp.{name}_proj": (inner, width) for name in ("gate", "up")}
        layer |= {"mlp.down_proj": (width, inner)}
        layer |= {"input_layernorm": (width,), "post_attention_layernorm": (width,)}
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    tensors = {f"model.{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}
    tensors["lm_head.weight"] = torch.zeros(VOCAB_SIZE, width)
    save_file(tensors, path / "model.safetensors")


def start(name: str, model: Path, graph_us: float) -> Shards:
    environment = start_environment(
        ROOT / "patches" / "hook",
        {
            "BENCH_GRAPH_US": str(graph_us),
            "TEST_FREE_MEMORY": str(FREE_BYTES),
            "BICL_DEBUG_POISON": "0",
            **SHARDS[name],
        },
    )
    environment["PYTHONPATH"] = os.pathsep.join([str(SHARD), environment["PYTHONPATH"]])
    return Shards(model, environment)


def race(routers: dict[str, Router], batch: int, context: int) -> dict[str, list[float]]:
    """Microseconds of every timed step, of shards that take turns."""
    new_tokens = ROUNDS * (WARM_STEPS + STEPS) + 2
    running: dict[str, list[Sequence]] = {}
    for name, router in routers.items():
        prompts = [WORDS.prompt(context, f"{batch}/{i}") for i in range(batch)]
        running[name] = [router.sequence(prompt, new_tokens) for prompt in prompts]
        router.prefill(*running[name])
    found: dict[str, list[float]] = {name: [] for name in routers}
    for number in range(ROUNDS):
        for name in list(routers)[:: -1 if number % 2 else 1]:
            routers[name].decode(WARM_STEPS + STEPS)
            found[name] += routers[name].step_microseconds[-STEPS:]
    for name, router in routers.items():
        router.abandon()
        for sequence in running[name]:
            router.release(sequence)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write results here, as JSON")
    parser.add_argument("--impls", default=",".join(SHARDS), help=", ".join(SHARDS))
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--graph-us", type=float, default=3000, help="of the pretended graph")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        model = Path(temporary) / "tiny"
        write_model(model)
        shards = {n: start(n, model, options.graph_us) for n in options.impls.split(",")}
        try:
            total = options.context + PREFILL_TOKENS
            routers = {
                name: step.warm_up(each.__enter__(), WORDS, PREFILL_TOKENS, total)
                for name, each in shards.items()
            }
            for batch in map(int, options.batches.split(",")):
                for name, times in race(routers, batch, options.context).items():
                    beyond = sorted(us - options.graph_us for us in times)
                    row = {"op": "host-step", "shape": f"{batch}x{options.context}", "impl": name}
                    row |= {"us": round(statistics.median(beyond), 1)}
                    row |= {"us_p20": round(beyond[len(beyond) // 5], 1)}
                    row |= {"us_mean": round(statistics.fmean(beyond), 1)}
                    rows.append(row)
                    print(*row.values(), flush=True)
        finally:
            for each in shards.values():
                each.stop()
    if options.out:
        what = (
            f"host time of a decode step beyond a graph of {options.graph_us:.0f} us, median of "
            f"{ROUNDS} rounds of {STEPS} steps in turns"
        )
        save(options.out, describe(what), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
