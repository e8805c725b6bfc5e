"""Long mixed traffic through TGI's real shard with an 8B-shaped Llama, watched from the inside.

::

    python -m bench.tgi.soak --out bench/results/tgi-soak-h200.json
    python -m bench.tgi.soak --tensor-parallel 2 --requests 300 --out ...

A thousand requests with shared prefixes, chunks and cancellations, CUDA graphs on; beside them, in
a shard of their own, fewer with n-gram speculation, of a model that can say few words, so that some
drafts are right and most are wrong. Free pages are full of NaN and must stay so, shared pages must
not change, attention of sampled steps and layers is compared with PyTorch's in float32 over keys
and values kept apart from ours, and sampled requests are run again alone. A wrong page or token
ends the run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from bench.record import save
from bench.tgi.step import Words, describe, gpu_environment, warm_up, write_model
from bicl.frontends.tgi.selftest.bench import Bench
from bicl.frontends.tgi.selftest.shard import Shards
from bicl.frontends.tgi.selftest.soak import Soak

FREE_BYTES = 20 * 10**9
PREFILL_TOKENS = 4096
TOTAL_TOKENS = 8192
TIE = 0.26  # a fifth of the logits' spread: of 128,256 a handful are as near to the best one
WORDS = 16  # that the drafted model can say: by chance alone one draft in 16 is right
DRAFTED_TOKENS = 48  # of a request at most: words must come again


def run(model: Path, options: argparse.Namespace, drafts: int) -> dict[str, Any]:
    """One shard from start to end. Raises AssertionError if anything is wrong."""
    begin = time.monotonic()
    environment = gpu_environment(
        TEST_FREE_MEMORY=str(FREE_BYTES // options.tensor_parallel),
        BENCH_SEEDED_WEIGHTS="1",
        BICL_DEBUG_POISON="1",
        TEST_AUDIT_EVERY="8",
        BENCH_WORDS=str(WORDS if drafts else 0),
    )
    flags = ["--dtype", "bfloat16", *(["--speculate", str(drafts)] if drafts else [])]
    requests = options.requests if not drafts else options.drafted_requests
    with Shards(model, environment, *flags, world_size=options.tensor_parallel) as shards:
        router = warm_up(shards, Words(), PREFILL_TOKENS, TOTAL_TOKENS)
        bench = Bench(shards, router, router.model, 0, 0, kv_bytes=2, exact=False, tie=TIE)  # type: ignore[arg-type]
        started = time.monotonic()
        longest = DRAFTED_TOKENS if drafts else 20
        soak = Soak(
            bench, requests=requests, rows=32, tail=300, new_tokens=longest, compare=options.compare
        )
        result = soak.run()
        assert not drafts or (result["drafts"] and result["refused"]), "drafts all had one fate"
    return {
        "tensor_parallel": options.tensor_parallel,
        "speculate": drafts,
        "start_s": round(started - begin, 1),
        "traffic_s": round(time.monotonic() - started, 1),
        **result,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="results, as JSON")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--drafted-requests", type=int, default=300, help="with speculation")
    parser.add_argument("--drafts", default="0,2", help="--speculate of each shard")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--compare", type=int, default=25, help="requests run again alone")
    options = parser.parse_args()
    rows = []
    drafts = list(map(int, options.drafts.split(",")))
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(len(drafts)) as pool:
        model = Path(temporary) / "8b"
        write_model(model)
        for done in as_completed([pool.submit(run, model, options, each) for each in drafts]):
            rows.append(done.result())
            print(json.dumps(rows[-1]), flush=True)
            what = "requests through TGI's real shard; a wrong page or token would have ended it"
            save(options.out, describe(what) | {"tie": TIE}, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
