"""The self-test's scenarios in TGI's real shard on a GPU: bf16, CUDA graphs, our kernels.

::

    python -m bench.tgi.check --jobs 12 --out bench/results/tgi-checks-h200.json
    python -m bench.tgi.check llama llama-speculate2

A request's tokens must be those of the same prompt alone, or as likely; where there are adapters,
those of transformers in float32: a shard that leaves them out agrees with itself.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from bench.record import save
from bench.tgi.step import describe, gpu_environment, warm_up
from bicl.frontends.tgi.selftest import bench as selftest
from bicl.frontends.tgi.selftest.models import Model, make_model
from bicl.frontends.tgi.selftest.scenarios import SCENARIOS
from bicl.frontends.tgi.selftest.shard import Shards

START = "start_and_warm_up"
WITHOUT = ("capacity_fills_the_memory_and_no_more",)  # a GPU's pages are counted in bf16
TIE = 0.3  # log-probability by which bf16 may prefer another token than bf16 in another batch
TIE_BESIDE_FLOAT32 = 1.0  # the same beside float32; a wrong token is several less likely


def check(name: str, only: Collection[str] = ()) -> list[dict[str, Any]]:
    """One row a case of a scenario; ``problem`` is empty if it held. ``only``: of these cases."""
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for case, problem in _cases(name, Path(folder), only):
                print(f"{'FAIL' if problem else 'ok':<5}{name} {case} {problem[:400]}", flush=True)
                rows.append({"op": "check", "scenario": name, "case": case, "problem": problem})
        except Exception as error:
            print(f"FAIL {name} {error}", flush=True)
            rows.append(
                {"op": "check", "scenario": name, "case": START, "problem": str(error)[-400:]}
            )
    return rows


def _cases(name: str, folder: Path, only: Collection[str]) -> Iterator[tuple[str, str]]:
    scenario = SCENARIOS[name]
    model = make_model(scenario.model, folder)
    adapters = [f"{each}={model.path / each}" for each in scenario.adapters]
    environment = gpu_environment(
        TEST_FREE_MEMORY=str(scenario.free_bytes),
        BICL_DEBUG_POISON="1",
        TEST_AUDIT_EVERY="4",
        LORA_ADAPTERS=",".join(adapters),
        **scenario.environment,
    )
    if scenario.disk_cache:
        environment["BICL_DISK_CACHE_DIR"] = str(folder / "disk")

    def start() -> selftest.Bench:
        shards = Shards(
            model.path, environment, "--dtype", "bfloat16", *scenario.flags,
            world_size=scenario.world_size,
        ).__enter__()  # fmt: skip
        try:
            router = warm_up(shards, model, selftest.PREFILL_TOKENS, selftest.TOTAL_TOKENS)
        except BaseException:
            shards.stop()
            raise
        return selftest.Bench(
            shards,
            router,
            model,
            num_tokens=0,
            free_bytes=0,
            kv_bytes=min(scenario.kv_bytes, 2),
            exact=bool(adapters),
            tie=TIE_BESIDE_FLOAT32 if adapters else TIE,
            prefixes=scenario.prefixes,
        )

    def restart() -> None:
        while not all(bench.shards.auditor().settled()):
            time.sleep(0.05)
        bench.shards.stop()
        fresh = start()
        bench.shards, bench.router = fresh.shards, fresh.router

    bench = start()
    bench.restart = restart
    try:
        yield START, ""
        if name == "llama" and not only:
            compare_logprobs(bench, model)
        for each, case in scenario.cases.items():
            if each in WITHOUT or (only and each not in only):
                continue
            try:
                case(bench)
                yield each, ""
            except Exception as error:
                bench.router.abandon()
                yield each, f"{type(error).__name__}: {error}"[-400:]
        if bench.router.speculate:
            print(f"{name}: {bench.router.accepted_drafts} drafts accepted", flush=True)
    finally:
        bench.shards.stop()


def compare_logprobs(bench: selftest.Bench, model: Model) -> None:
    """Differences of the chosen tokens' log-probabilities, over prompts and decode steps."""
    from transformers import AutoModelForCausalLM

    exact = model._model.cuda()
    rounded = AutoModelForCausalLM.from_pretrained(model.path, torch_dtype=torch.bfloat16).cuda()
    ours, theirs = [], []
    for length in (5, 64, 100, 129, 200):
        sequence = bench.sequence(bench.prompt(length, 77), new_tokens=24)
        bench.router.prefill(sequence)
        bench.router.finish()
        ids = torch.tensor([sequence.prompt + sequence.tokens], device="cuda")
        places = torch.arange(length - 1, ids.shape[1] - 1, device="cuda")
        chosen = ids[0, length:]
        with torch.inference_mode():
            truth, bf16 = (
                m(ids).logits[0, places].float().log_softmax(-1).gather(1, chosen[:, None])[:, 0]
                for m in (exact, rounded)
            )
        got = torch.tensor(sequence.logprobs, device="cuda")
        ours += (got - truth).abs().tolist()
        theirs += (bf16 - truth).abs().tolist()
    for name, values in (("shard", ours), ("transformers bf16", theirs)):
        print(
            f"log-probability beside float32, {name}: mean {statistics.mean(values):.4f}, "
            f"max {max(values):.4f} over {len(values)} tokens",
            flush=True,
        )
    model._model.cpu()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenarios", nargs="*", help="default: all that one GPU can run")
    parser.add_argument("--case", action="append", default=[], help="only this one; repeatable")
    parser.add_argument("--jobs", type=int, default=1, help="shards at a time")
    parser.add_argument("--out", type=Path, help="write results here, as JSON")
    options = parser.parse_args()
    one = [name for name, scenario in SCENARIOS.items() if scenario.world_size == 1]
    rows: list[dict[str, Any]] = []
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, mp_context=spawn) as pool:
        names = options.scenarios or one
        for done in as_completed([pool.submit(check, name, options.case) for name in names]):
            rows += done.result()
            if options.out:
                what = "cases of the self-test in the real shard, bf16, graphs"
                save(options.out, describe(what), rows)
    failed = sum(bool(row["problem"]) for row in rows)
    print(f"{len(rows) - failed} held, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
