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
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.record import machine, save
from bicl.frontends.tgi.hook import find_package
from bicl.frontends.tgi.selftest.router import Router, Sequence, request_of
from bicl.frontends.tgi.selftest.shard import ShardFailed, Shards
from bicl.frontends.tgi.upstream import identify, read_upstream

ROOT = Path(__file__).parents[2]
STANDINS = Path(__file__).parent / "standins"
SHAPES = (
    (1, 1024), (8, 1024), (32, 1024),
    (1, 4096), (8, 4096), (32, 4096),
    (1, 16384), (8, 16384), (32, 16384),
    (128, 1024), (128, 4096),  # 128 x 16384 would need 275 GB of pages
)  # fmt: skip
GRAPHS = "1,2,4,8,16,32,128"
ROUNDS = 6  # of all caches in turns, forwards and backwards; alone where one fills the card
WARM_STEPS, STEPS = 2, 8  # of a round
TIMELINE_STEPS = 6
PREFILL_TOKENS = 4096
TOTAL_TOKENS = 16640
TOKENS_TOGETHER = 142_000  # of every shard while all take turns on one card
VOCAB_SIZE = 128256
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": VOCAB_SIZE,
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
    """Prompts of a word-level tokenizer: word i is token i, so that every token has a text, as in
    a real vocabulary. (TGI decodes a token without one again and again, with all behind it.)"""

    def __init__(self, vocab_size: int = VOCAB_SIZE) -> None:
        self._others = vocab_size - 4  # beside the special ones

    def prompt(self, length: int, seed: str) -> list[int]:
        start = sum(seed.encode()) * 31
        return [4 + (start + i) % self._others for i in range(length)]

    def text(self, ids: list[int]) -> str:
        return " ".join(f"w{i}" for i in ids)


def write_model(path: Path, sizes: Mapping[str, Any] = LLAMA_8B) -> None:
    """Config, tokenizer with a word a token, and a checkpoint file that only has to exist."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path.mkdir(parents=True)
    config = {**LLAMA_8B, **sizes}
    (path / "config.json").write_text(json.dumps(config))
    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    words = {w: i for i, w in enumerate(special)}
    words |= {f"w{i}": i for i in range(len(special), config["vocab_size"])}
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
        "NCCL_NVLS_ENABLE": "0",  # multicast over NVLink is not there in every virtual machine
        **more,
    }


def warm_up(shards: Shards, texts: Any, prefill: int, total: int) -> Router:
    request = request_of(0, texts.text(texts.prompt(prefill, "warm-up")), prefill)
    request.stopping_parameters.max_new_tokens = total - prefill
    num_tokens = shards.warmup([request], prefill, total)
    print(f"capacity {num_tokens} tokens", flush=True)
    return Router(shards, texts, num_tokens, shards.info().block_size)


OURS = {"BICL_VERIFY_PREFIXES": "0"}
STOCK = {"BICL_DISABLE": "1", "ATTENTION": "flashinfer"}
IMPLS: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "bicl": (OURS, ()),
    "bicl-fp8": (OURS, ("--kv-cache-dtype", "fp8_e4m3fn")),
    "flashinfer-p1": (STOCK, ()),
    "flashinfer-p1-tc": ({**STOCK, "BENCH_TENSOR_CORES": "1"}, ()),
    "bicl-checked": ({}, ()),
    "bicl-host-cache": ({"BICL_HOST_CACHE_SIZE": "8GiB"}, ()),
}
"""What differs between the shards. ``flashinfer-p1`` is TGI's default with today's FlashInfer.
``bicl-checked`` and ``bicl-host-cache`` believe no claim, so their contexts are computed, and are
the same: the one is what the other is compared with."""
PROMISED = ("bicl", "bicl-fp8", "flashinfer-p1", "flashinfer-p1-tc")


BYTES = {"bicl-fp8": 65536}  # of a token in all layers, K and V
BYTES_BF16 = 131072


class Contestant:
    """One shard. Its process starts at once and is used by one thread at a time."""

    def __init__(self, name: str, model: Path, folder: Path) -> None:
        self.name, self.bytes = name, BYTES.get(name, BYTES_BF16)
        self._memory, self._profile, self._timeline = (
            folder / f"{name}.{what}" for what in ("memory", "profile", "timeline")
        )
        environment, flags = IMPLS[name]
        environment = gpu_environment(
            BENCH_FREE_MEMORY=str(self._memory),
            BENCH_SEEDED_WEIGHTS="1",
            BENCH_FILL_PAGES="1",
            BENCH_PROFILE=str(self._profile),
            BENCH_TIMELINE=str(self._timeline),
            **environment,
        )
        self.shards = Shards(model, environment, "--dtype", "bfloat16", *flags)
        self._router: Router | None = None
        self._sequences: list[Sequence] = []
        self._rounds: list[list[float]] = []

    def warm_up(self, num_tokens: int) -> None:
        """Make pages for so many tokens, in place of those before; 0: keep none."""
        self.shards.__enter__()
        kept = max(num_tokens - TOTAL_TOKENS, 0)  # TGI adds the warm-up's own
        self._memory.write_text(str(kept * self.bytes))
        self._router = warm_up(self.shards, Words(), PREFILL_TOKENS, TOTAL_TOKENS)

    def begin(self, prompts: list[list[int]], rounds: int) -> None:
        """Claim that all but the last token of each prompt is cached, and compute that."""
        assert self._router is not None
        self._timeline.unlink(missing_ok=True)
        self._rounds = []
        self._sequences = [self._router.sequence(ids, steps_of(rounds)) for ids in prompts]
        self._router.prefill(*self._sequences, cached=len(prompts[0]) - 1)

    def time_round(self) -> None:
        assert self._router is not None
        self._router.decode(WARM_STEPS + STEPS)
        self._rounds.append(self._router.step_microseconds[-STEPS:])

    def medians(self) -> dict[str, Any]:
        """Microseconds of a decode step: the shard's own time (``us``, and that of each round);
        and, of some steps after the timed ones, on the host before the graph, on the GPU in it,
        and after."""
        assert self._router is not None
        result = {"us": statistics.median(us for each in self._rounds for us in each)}
        self._timeline.touch()
        self._router.decode(TIMELINE_STEPS)
        lines = [json.loads(line) for line in self._timeline.read_text().splitlines()]
        if lines:  # a step that no graph holds has none
            for part in ("before", "graph", "after"):
                result[f"{part}_us"] = statistics.median(line[part] for line in lines)
        facts: dict[str, Any] = {name: round(value, 1) for name, value in result.items()}
        return facts | {"rounds_us": [round(statistics.median(each)) for each in self._rounds]}

    def end(self) -> None:
        assert self._router is not None
        self._router.abandon()
        for sequence in self._sequences:
            self._router.release(sequence)
        self._sequences = []

    def profile(self, prompts: list[list[int]], out: Path) -> None:
        """Write the kernels of one step; the process is slower from then on."""
        self._profile.write_text(str(out))
        self.begin(prompts, ROUNDS)
        self.time_round()
        self.end()


def prompts_of(batch: int, context: int) -> list[list[int]]:
    return [Words().prompt(context, f"{batch}/{i}") for i in range(batch)]


def steps_of(rounds: int) -> int:
    """Of a request: timed, watched, and some that end it."""
    return rounds * (WARM_STEPS + STEPS) + TIMELINE_STEPS + 2


def tokens_of(batch: int, context: int, rounds: int) -> int:
    """That the pages of a shape hold, page 0 included."""
    pages = -(-(context + steps_of(rounds)) // 64)
    return (batch * pages + 1) * 64


def each(action: Callable[[Contestant], Any], contestants: list[Contestant]) -> None:
    """All at once, untimed. One that fails is told of, stopped and dropped."""

    def tried(contestant: Contestant) -> bool:
        try:
            action(contestant)
        except (ShardFailed, OSError) as error:
            print(f"{contestant.name} failed: {str(error)[-600:]}", flush=True)
            contestant.shards.stop()
            return False
        return True

    with ThreadPoolExecutor(max(len(contestants), 1)) as pool:
        fine = list(pool.map(tried, contestants))
    contestants[:] = [c for c, ok in zip(contestants, fine, strict=True) if ok]


def race(
    contestants: list[Contestant], batch: int, context: int, rounds: int, settle: float
) -> list[dict[str, Any]]:
    """A shape's rows: prefills side by side, then each contestant's steps alone, in rounds."""
    prompts, rows = prompts_of(batch, context), []
    each(lambda c: c.begin(prompts, rounds), contestants)
    time.sleep(settle)

    def add_row(contestant: Contestant) -> None:
        row = {"op": "step", "heads": "32/8", "shape": f"{batch}x{context}"}
        row |= {"impl": contestant.name} | ({"settled_s": settle} if settle else {})
        rows.append(row | contestant.medians())
        print(*rows[-1].values(), flush=True)

    for number in range(rounds):
        in_turns(Contestant.time_round, contestants, backwards=bool(number % 2))
    in_turns(add_row, contestants)
    each(Contestant.end, contestants)
    return rows


def in_turns(
    action: Callable[[Contestant], Any], contestants: list[Contestant], *, backwards: bool = False
) -> None:
    """One after the other; one that fails is dropped."""
    for contestant in contestants[:: -1 if backwards else 1]:
        alone = [contestant]
        each(action, alone)
        if not alone:
            contestants.remove(contestant)


def describe(what: str) -> dict[str, Any]:
    """What the rows were measured on."""
    packages = ("transformers", "flashinfer-python")
    found = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    upstream = read_upstream(ROOT / "patches" / "UPSTREAM")
    return machine(what=what, tgi=identify(find_package(), upstream).name, **found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write results here, as JSON")
    parser.add_argument("--profile", type=Path, help="write each shape's kernels into this folder")
    parser.add_argument("--impls", default=",".join(PROMISED), help=", ".join(IMPLS))
    parser.add_argument("--shapes", default=",".join(f"{b}x{c}" for b, c in SHAPES))
    parser.add_argument("--seconds", type=float, default=3600, help="begin nothing after this")
    parser.add_argument(
        "--settle", default="0", help="seconds in which a host cache takes new pages; 0,3: both"
    )
    options = parser.parse_args()
    began = time.monotonic()
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes.split(",")]
    small = [shape for shape in shapes if tokens_of(*shape, ROUNDS) <= TOKENS_TOGETHER]
    large = [shape for shape in shapes if shape not in small]
    what = (
        f"the shard's own time of a decode step, median of {ROUNDS} rounds of {STEPS} in turns, "
        f"alone where one fills the card; graphs {GRAPHS}"
    )
    rows: list[dict[str, Any]] = []

    def run(contestants: list[Contestant], batch: int, context: int, rounds: int) -> None:
        if time.monotonic() - began > options.seconds:
            print(f"{batch}x{context} left out: no time", flush=True)
            return
        for settle in map(float, options.settle.split(",")):
            rows.extend(race(contestants, batch, context, rounds, settle))
        print(f"{batch}x{context} done after {time.monotonic() - began:.1f} s", flush=True)
        if options.out:
            save(options.out, describe(what), rows)

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_model(folder / "8b")
        names = options.impls.split(",")
        contestants = [Contestant(name, folder / "8b", folder) for name in names]
        started = list(contestants)
        try:
            each(lambda c: c.warm_up(TOKENS_TOGETHER if small else 0), contestants)
            print(f"started after {time.monotonic() - began:.1f} s", flush=True)
            for batch, context in small:
                run(contestants, batch, context, ROUNDS)
            for batch, context in small if options.profile else ():
                for c in contestants:
                    name = f"{c.name}-{batch}x{context}"
                    c.profile(prompts_of(batch, context), options.profile / name)
            if large:  # one after another, the smallest pages first: weights leave with their shard
                most = max(tokens_of(*shape, ROUNDS) for shape in large)
                each(lambda c: c.warm_up(0), contestants)
                for contestant in sorted(contestants, key=lambda c: c.bytes):
                    alone = [contestant]
                    each(lambda c: c.warm_up(most), alone)
                    for batch, context in large:
                        run(alone, batch, context, ROUNDS)
                    contestant.shards.stop()
        finally:
            for contestant in started:
                contestant.shards.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
