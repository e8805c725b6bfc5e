"""Time of a decode step in TGI's real shard with an 8B-shaped Llama, CUDA graphs on.

Runs in an environment with TGI's Python server on a machine with a GPU::

    python -m bench.tgi.step --out bench/results/tgi-h200.json

Weights are seeded, N(0, 0.02). Contexts come without prefill: a request claims that all but its
last token is cached (``BICL_VERIFY_PREFIXES=0``) on pages full of N(0, 0.5); for timing their
content does not matter. ``standins/`` has our own kernels in place of those that TGI loads from
the hub: rotary embedding and norms are the same for every cache.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.record import machine, save
from bicl.frontends.tgi.selftest.router import Router, request_of
from bicl.frontends.tgi.selftest.shard import ShardFailed, Shards

ROOT = Path(__file__).parents[2]
STANDINS = Path(__file__).parent / "standins"
SHAPES = (
    (1, 1024), (8, 1024), (32, 1024),
    (1, 4096), (8, 4096), (32, 4096),
    (1, 16384), (8, 16384), (32, 16384),
    (128, 1024), (128, 4096),  # 128 x 16384 would need 275 GB of pages
)  # fmt: skip
GRAPHS = "1,2,4,8,16,32,128"
STEPS = 30
TIMED_STEPS = STEPS + 5
TIMELINE_STEPS = 8
PREFILL_TOKENS = 4096
TOTAL_TOKENS = 16640
FREE_BYTES = 90 * 10**9
NUM_WORDS = 20000
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class Words:
    """Prompts of a word-level tokenizer: word i is token i."""

    def prompt(self, length: int, seed: str) -> list[int]:
        start = sum(seed.encode()) * 31
        return [4 + (start + i) % (NUM_WORDS - 4) for i in range(length)]

    def text(self, ids: list[int]) -> str:
        return " ".join(f"w{i}" for i in ids)


def write_model(path: Path) -> None:
    """Config, tokenizer, and a checkpoint file that only has to exist."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(LLAMA_8B))
    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    words = {w: i for i, w in enumerate(special)}
    words |= {f"w{i}": i for i in range(len(special), NUM_WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(path)
    save_file({"empty": torch.zeros(1)}, path / "model.safetensors")


def gpu_environment(**more: str) -> dict[str, str]:
    paths = [STANDINS, ROOT / "patches" / "hook", ROOT / "server", os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "ATTENTION": "flashdecoding",
        "PREFIX_CACHING": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_GRAPHS": GRAPHS,
        **more,
    }


def warm_up(shards: Shards, texts: Any, prefill: int, total: int) -> Router:
    request = request_of(0, texts.text(texts.prompt(prefill, "warm-up")), prefill)
    request.stopping_parameters.max_new_tokens = total - prefill
    num_tokens = shards.warmup([request], prefill, total)
    print(f"capacity {num_tokens} tokens", flush=True)
    return Router(shards, texts, num_tokens, shards.info().block_size)


def time_shape(router: Router, batch: int, context: int, timeline: Path) -> dict[str, float]:
    """Microseconds of a decode step, medians: the shard's own time (``us``); and, of some steps
    after the timed ones, on the host before the graph, on the GPU in it, and after it."""
    sequences = []
    for i in range(batch):
        ids = router.model.prompt(context, f"{batch}/{i}")
        sequences.append(router.sequence(ids, TIMED_STEPS + TIMELINE_STEPS + 2))
    timeline.unlink(missing_ok=True)
    router.prefill(*sequences, cached=context - 1)
    router.decode(TIMED_STEPS)
    result = {"us": statistics.median(router.step_microseconds[-STEPS:])}
    router.decode(TIMELINE_STEPS)
    router.abandon()
    for sequence in sequences:
        router.release(sequence)
    if timeline.exists():  # a step that no graph holds has no line
        lines = [json.loads(line) for line in timeline.read_text().splitlines()]
        for part in ("before", "graph", "after"):
            result[f"{part}_us"] = statistics.median(line[part] for line in lines)
    return {name: round(value, 1) for name, value in result.items()}


OURS = {"BICL_VERIFY_PREFIXES": "0"}
STOCK = {"BICL_DISABLE": "1", "ATTENTION": "flashinfer"}
IMPLS: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "bicl": (OURS, ()),
    "bicl-fp8": (OURS, ("--kv-cache-dtype", "fp8_e4m3fn")),
    "flashinfer-p1": (STOCK, ()),
    "flashinfer-p1-tc": ({**STOCK, "BENCH_TENSOR_CORES": "1"}, ()),
}
"""What differs between the shards. ``flashinfer-p1`` is TGI's default with today's FlashInfer."""


def time_steps(
    folder: Path, name: str, shapes: list[tuple[int, int]], profile: Path | None
) -> list[dict[str, Any]]:
    environment, flags = IMPLS[name]
    environment = gpu_environment(
        TEST_FREE_MEMORY=str(FREE_BYTES),
        BENCH_SEEDED_WEIGHTS="1",
        BENCH_FILL_PAGES="1",
        BENCH_PROFILE=str(folder / "profile"),
        BENCH_TIMELINE=str(folder / "timeline"),
        BENCH_TIMED_STEPS=str(TIMED_STEPS),
        **environment,
    )
    timeline = folder / "timeline"
    rows = []
    with Shards(folder, environment, "--dtype", "bfloat16", *flags) as shards:
        router = warm_up(shards, Words(), PREFILL_TOKENS, TOTAL_TOKENS)
        for batch, context in shapes:
            shape = f"{batch}x{context}"
            try:
                times = time_shape(router, batch, context, timeline)
            except ShardFailed as error:
                print(f"{name:<18}{shape:<10}failed: {str(error)[-600:]}", flush=True)
                break
            row: dict[str, Any] = {"op": "step", "heads": "32/8", "shape": shape, "impl": name}
            rows.append(row | times)
            print(f"{name:<18}{shape:<10}{times}", flush=True)
        for batch, context in shapes if profile else ():
            # Last: a profiled process is slower from then on.
            (Path(environment["BENCH_PROFILE"])).write_text(
                str(profile / f"{name}-{batch}x{context}")
            )
            time_shape(router, batch, context, timeline)
    return rows


def describe(what: str) -> dict[str, Any]:
    """What the rows were measured on."""
    packages = ("transformers", "flashinfer-python")
    found = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return machine(what=what, **found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write results here, as JSON")
    parser.add_argument("--profile", type=Path, help="write each shape's kernels into this folder")
    parser.add_argument("--impls", default=",".join(IMPLS), help="default: all")
    parser.add_argument("--shapes", default=",".join(f"{b}x{c}" for b, c in SHAPES))
    options = parser.parse_args()
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes.split(",")]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_model(folder / "8b")
        for name in options.impls.split(","):
            rows += time_steps(folder / "8b", name, shapes, options.profile)
            if options.out:
                what = f"the shard's own time of a decode step, median of {STEPS}; graphs {GRAPHS}"
                save(options.out, describe(what), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
