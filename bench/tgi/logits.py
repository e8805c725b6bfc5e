"""Log-probabilities of an 8B-shaped Llama in TGI's real shard, beside attention of another hand.

::

    python -m bench.tgi.logits --out bench/results/tgi-logits-h200.json

The shard runs in bf16 with CUDA graphs; after each token it tells the likeliest ones and their
log-probabilities. Plain transformers with the same weights goes over prompt and answer in float32,
with PyTorch's own attention: a row is how far the shard is from that. Beside it the same of TGI's
default cache (FlashInfer), which shares all but the cache with ours, and of plain transformers in
bf16, which shows what rounding alone does.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from bench.record import save
from bench.tgi.standins.seeded_weights import SeededWeights
from bench.tgi.step import STOCK, Words, describe, gpu_environment, warm_up, write_model
from bicl.frontends.tgi.selftest.router import Router, Sequence
from bicl.frontends.tgi.selftest.shard import Shards

IMPLS = {"bicl": {}, "flashinfer-p1": STOCK}  # claims of cached prefixes are checked
FREE_BYTES = 8 * 10**9
PREFILL_TOKENS, TOTAL_TOKENS = 4096, 8192
NEW_TOKENS, LIKELIEST = 24, 5
Answers = dict[str, list[Sequence]]


def answers_of(model: Path, environment: dict[str, str]) -> Answers:
    """What a shard says, by the way in which the prompt was computed."""
    environment = gpu_environment(
        TEST_FREE_MEMORY=str(FREE_BYTES), BENCH_SEEDED_WEIGHTS="1", **environment
    )
    with Shards(model, environment, "--dtype", "bfloat16") as shards:
        return drive(warm_up(shards, Words(), PREFILL_TOKENS, TOTAL_TOKENS))


def drive(router: Router) -> Answers:
    """Prompts of several lengths that join one batch; then one in chunks beside one that begins
    with pages of another."""
    found: Answers = defaultdict(list)

    def send(how: str, prompt: list[int], shared: list[int], **options: Any) -> Sequence:
        sequence = router.sequence(prompt, NEW_TOKENS, shared)
        sequence.top = LIKELIEST
        router.prefill(sequence, **options)
        found[how].append(sequence)
        return sequence

    words = router.model
    for length in (5, 64, 129, 1000, 3000):
        last = send("whole", words.prompt(length, f"whole/{length}"), [])
    router.finish()
    cached = 2048
    prompt = last.prompt[:cached] + words.prompt(77, "tail")
    send("chunks", words.prompt(2500, "chunks"), [], chunk=999)
    send("cached prefix", prompt, last.pages[: cached // router.page_size], cached=cached)
    router.finish()
    return dict(found)


def reference(model: Path, dtype: torch.dtype, device: str) -> Any:
    """Plain transformers with the shard's weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device(device):
        made = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(model), torch_dtype=dtype, attn_implementation="sdpa"
        )
    weights = SeededWeights(str(model / "model.safetensors"))
    with torch.no_grad():
        for name, tensor in made.named_parameters():
            tensor.copy_(weights.get_tensor(name))
    return made.eval()


@torch.inference_mode()
def expected(model: Any, sequence: Sequence) -> torch.Tensor:
    """``[steps, words]`` float32 log-probabilities of what may follow, on the model's device."""
    ids = torch.tensor([sequence.prompt + sequence.tokens[:-1]], device=model.device)
    logits = model(ids, use_cache=False, logits_to_keep=len(sequence.tokens)).logits[0]
    return logits.float().log_softmax(-1)


def distances(told: list[dict[int, float]], truth: torch.Tensor) -> list[float]:
    """Of the log-probabilities told for a few words a step from ``truth`` ``[steps, words]``."""
    return [
        abs(value - float(truth[step, word]))
        for step, values in enumerate(told)
        for word, value in values.items()
    ]


def compare(answers: dict[str, Answers], model: Path, device: str) -> Iterator[dict[str, Any]]:
    """Two rows for each shard and way of computing a prompt: the shard's, and those of transformers
    in bf16 for the same words."""
    exact = reference(model, torch.float32, device)
    rounded = reference(model, torch.bfloat16, device)
    for shard, found in answers.items():
        for how, sequences in found.items():
            errors: dict[str, list[float]] = {shard: [], "transformers-bf16": []}
            best: list[bool] = []
            for sequence in sequences:
                truth, bf16 = expected(exact, sequence), expected(rounded, sequence)
                same = [{w: float(bf16[i, w]) for w in t} for i, t in enumerate(sequence.tops)]
                errors[shard] += distances(sequence.tops, truth)
                errors["transformers-bf16"] += distances(same, truth)
                best += (truth.argmax(-1).cpu() == torch.tensor(sequence.tokens)).tolist()
            for impl, values in errors.items():
                row = {"op": "logprob", "prompt": how, "answers_of": shard, "impl": impl}
                row |= {"mean": round(statistics.mean(values), 5), "worst": round(max(values), 5)}
                yield row | {"values": len(values), "steps": len(best), "likeliest": sum(best)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="results, as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        model = Path(temporary) / "8b"
        write_model(model)
        with ThreadPoolExecutor(len(IMPLS)) as pool:
            found = pool.map(lambda environment: answers_of(model, environment), IMPLS.values())
            answers = dict(zip(IMPLS, found, strict=True))
        rows = []
        for row in compare(answers, model, "cuda"):
            rows.append(row)
            print(*row.values(), flush=True)
    what = f"|log-probability - float32's| of the {LIKELIEST} likeliest tokens of a step"
    save(options.out, describe(what), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
