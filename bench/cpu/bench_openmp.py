"""What OpenMP's threads of other parts of a program cost the embedded engine on a CPU.

    python -m bench.cpu.bench_openmp [--rounds N] [--out FILE]

Requests of random prompts through an engine with reuse off and two threads, in a process of its
own each time, since OpenMP keeps its threads for good. Before the engine starts, a product of
matrices is computed by nobody, by a thread that goes on living, or by one that ends; ``passive``:
``OMP_WAIT_POLICY=passive``; ``beside a busy loop``: another program wants one of the cores. A row
has medians of seconds, CPU seconds, and how often threads that are not Python's gave up their core.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.record import machine, save
from bench.serving.load import finish, random_prompt, submit
from bicl.frontends.http.engine import Engine, EngineConfig
from bicl.frontends.http.loader import bundled_model_path, load_model

THREADS, REQUESTS, PROMPT, REPLY = 2, 4, 200, 24
PASSIVE = {"OMP_WAIT_POLICY": "passive"}
CASES: dict[str, tuple[str, dict[str, str], bool]] = {
    "nothing before": ("nobody", {}, False),
    "a product on a thread that lives": ("living", {}, False),
    "a product on a thread that ended": ("ended", {}, False),
    "nothing before, passive": ("nobody", PASSIVE, False),
    "beside a busy loop": ("nobody", {}, True),
    "beside a busy loop, passive": ("nobody", PASSIVE, True),
}
"""Name -> who computes before the engine, environment, whether another program is busy."""


def computed_by(who: str) -> None:
    """A product of matrices by a thread that goes on ``living``, or has ``ended``, or by nobody."""
    done, forever = threading.Event(), threading.Event()

    def work() -> None:
        torch.set_num_threads(THREADS)
        torch.randn(512, 512) @ torch.randn(512, 512)
        done.set()
        if who == "living":
            forever.wait()

    if who != "nobody":
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        done.wait()
        if who == "ended":
            thread.join()


def sleeps() -> int:
    """How often threads that Python does not know gave up their core by themselves."""
    known = {str(thread.native_id) for thread in threading.enumerate()}
    others = [task for task in Path("/proc/self/task").iterdir() if task.name not in known]
    lines = [line for task in others for line in (task / "status").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary"))


def measure(who: str) -> dict[str, float]:
    """One case, in this process."""
    computed_by(who)
    loaded = load_model(str(bundled_model_path()))
    config = EngineConfig(
        max_total_tokens=PROMPT + REPLY,
        max_batch_size=2,
        prefix_caching=False,
        num_threads=THREADS,
    )
    engine = Engine(loaded, config).start()
    rng = np.random.default_rng(0)
    prompts = [random_prompt(rng, PROMPT, loaded.vocab_size) for _ in range(REQUESTS)]
    finish(submit(engine, prompts[0], REPLY))
    before, began, cpu = sleeps(), time.perf_counter(), time.process_time()
    streams = [submit(engine, prompt, REPLY) for prompt in prompts]
    for stream in streams:
        finish(stream)
    found = {
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - cpu,
        "sleeps": sleeps() - before,
    }
    engine.stop()
    return found


def in_a_process(case: str) -> dict[str, float]:
    who, environment, busy = CASES[case]
    command = [sys.executable, "-m", "bench.cpu.bench_openmp", "--who", who]
    other = [subprocess.Popen([sys.executable, "-c", "while True: pass"])] if busy else []
    try:
        told = subprocess.run(
            command, env=os.environ | environment, capture_output=True, text=True, check=True
        )
    finally:
        for process in other:
            process.kill()
            process.wait()
    return dict(json.loads(told.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write results here, as JSON")
    parser.add_argument("--who", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.who:
        print(json.dumps(measure(options.who)))
        return
    found: dict[str, list[dict[str, float]]] = {case: [] for case in CASES}
    for _ in range(options.rounds):
        for case, runs in found.items():
            runs.append(in_a_process(case))
    rows: list[dict[str, Any]] = []
    for case, runs in found.items():
        middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        rows.append({"case": case, **{key: round(value, 2) for key, value in middle.items()}})
        print(rows[-1])
    if options.out:
        what = f"{REQUESTS} requests of {PROMPT} + {REPLY} tokens, SmolLM2-135M, float32, reuse off"
        save(options.out, machine(what=what), rows)


if __name__ == "__main__":
    main()
