"""The self-test's scenarios in TGI's real shard on a GPU: bf16, CUDA graphs, our kernels.

::

    python -m bench.tgi.check --jobs 24 --out bench/results/tgi-checks-h200.json
    python -m bench.tgi.check llama llama-speculate2
    python -m bench.tgi.check --cpu --jobs 2 --out bench/results/tgi-checks-cpu.json

A request's tokens must be those of the same prompt alone, or as likely; where there are adapters,
those of transformers in float32: a shard that leaves them out agrees with itself. Two ranks are
compared with one. ``--cpu``: in float32, and the tokens are those of plain transformers.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Collection, Generator, Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench.record import save
from bench.tgi.step import ROOT, describe, gpu_environment
from bicl.frontends.tgi.selftest.bench import Bench
from bicl.frontends.tgi.selftest.runner import START, Machine, Result, on_cpu, run_cases, running
from bicl.frontends.tgi.selftest.scenarios import SCENARIOS

GPU = Machine(
    gpu_environment(BICL_DEBUG_POISON="1", TEST_AUDIT_EVERY="4"),
    ("--dtype", "bfloat16"),
    half=True,
)
Row = dict[str, Any]
SAVE_SECONDS = 10.0
CPU = on_cpu(ROOT / "patches" / "hook")


def check(name: str, machine: Machine, only: Collection[str], until: float, journal: Path) -> None:
    """Every case of a scenario, or those of ``only``; none begins after ``until``. Each row is a
    line of the journal as soon as it is there."""
    torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(_rows(name, machine, Path(folder), only)) as found,
    ):
        for row in found:
            mark = "FAIL" if row.get("problem") else "ok"
            print(f"{mark:<5}{name}", *list(row.values())[2:], flush=True)
            with journal.open("a") as file:
                file.write(json.dumps(row) + "\n")
            if time.time() > until:
                print(f"{name}: no time for what follows", flush=True)
                break


def _rows(
    name: str, machine: Machine, folder: Path, only: Collection[str]
) -> Generator[Row, None, None]:
    begin, started = time.monotonic(), False
    try:
        with running(name, folder, machine) as bench:
            started = True
            yield _row(Result(name, START, time.monotonic() - begin))
            if machine.half and name == "llama" and not only:
                yield from compare_logprobs(name, bench)
            yield from map(_row, run_cases(name, bench, only))
            if bench.router.speculate:
                yield {"op": "drafts", "scenario": name, "accepted": bench.router.accepted_drafts}
    except Exception:
        case = "end" if started else START
        yield _row(Result(name, case, time.monotonic() - begin, traceback.format_exc()))


def _row(result: Result) -> Row:
    problem = result.problem.replace(f"{ROOT}/", "")[-400:]
    short = {"seconds": round(result.seconds, 2), "problem": problem}
    return {"op": "check", **asdict(result), **short}


def compare_logprobs(name: str, bench: Bench) -> Iterator[Row]:
    """How far the chosen tokens' log-probabilities are from float32, over prompts and decode
    steps: the shard's, and those of plain transformers in bf16."""
    from transformers import AutoModelForCausalLM

    exact = bench.model._model.cuda()
    rounded = AutoModelForCausalLM.from_pretrained(
        bench.model.path, torch_dtype=torch.bfloat16
    ).cuda()
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
    for whose, values in (("shard", ours), ("transformers", theirs)):
        yield {
            "op": "logprob",
            "scenario": name,
            "impl": whose,
            "mean": round(statistics.mean(values), 4),
            "worst": round(max(values), 4),
            "tokens": len(values),
        }
    bench.model._model.cpu()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenarios", nargs="*", help="default: all that these GPUs can run")
    parser.add_argument("--case", action="append", default=[], help="only this one; repeatable")
    parser.add_argument("--cpu", action="store_true", help="in float32, without a GPU")
    parser.add_argument("--jobs", type=int, default=1, help="shards at a time")
    parser.add_argument("--seconds", type=float, default=3600, help="begin no case after this")
    parser.add_argument("--out", type=Path, help="write results here, as JSON")
    options = parser.parse_args()
    until = time.time() + options.seconds
    machine = CPU if options.cpu else GPU
    most = 2 if options.cpu else torch.cuda.device_count()
    names = options.scenarios or [n for n, s in SCENARIOS.items() if s.world_size <= most]
    how = "float32 on the CPU" if options.cpu else "bf16, graphs"
    what = f"cases of the self-test in the real shard, {how}"
    rows: list[Row] = []
    # A server that has imported what the processes need: two dozen would else do so at once.
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["bicl.frontends.tgi.selftest.runner"])
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(options.jobs, mp_context=processes) as pool,
    ):
        journal = Path(folder) / "journal"
        journal.touch()
        pending = {
            pool.submit(check, name, machine, options.case, until, journal) for name in names
        }
        while pending:
            done, pending = wait(pending, SAVE_SECONDS)
            for each in done:
                each.result()
            rows = [json.loads(line) for line in journal.read_text().splitlines()]
            if options.out:
                save(options.out, describe(what), rows)
    problems = [row["problem"] for row in rows if row["op"] == "check"]
    failed = sum(map(bool, problems))
    print(f"{len(problems) - failed} held, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
