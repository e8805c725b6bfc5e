"""Processes of TGI's shard, and the calls its router makes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
from text_generation_server.pb import generate_pb2 as pb
from text_generation_server.pb import generate_pb2_grpc

from bicl.frontends.tgi.selftest.auditor import Auditor

__all__ = ["CALL_SECONDS", "ShardFailed", "Shards", "start_environment"]

START_SECONDS = 180
CALL_SECONDS = 300
STUBS = Path(__file__).parent / "stubs"


class ShardFailed(RuntimeError):
    """A shard ended, or did not start; the message has the end of its log."""


def start_environment(hook: Path, more: Mapping[str, str]) -> dict[str, str]:
    """Environment of a shard on the CPU.

    Args:
        hook: folder of ``bicl_tgi_start.py``.
        more: further variables.
    """
    package = Path(__file__).parents[4]
    paths = [str(STUBS), str(hook), str(package), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in paths if p),
        "ATTENTION": "flashdecoding",
        "PREFIX_CACHING": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "BICL_DEBUG_POISON": "1",
        **more,
    }


@dataclass
class Answer:
    """What a prefill or decode call gave.

    Attributes:
        tokens, logprobs: new ones, by request.
        tops: for each new token of a request that asked for it, the likeliest ones with their
            log-probabilities.
        finished: requests that have ended.
        batch: what the shard keeps, or None.
        microseconds: the shard's own time for the step.
    """

    tokens: dict[int, list[int]]
    logprobs: dict[int, list[float]]
    tops: dict[int, list[dict[int, float]]]
    finished: set[int]
    batch: Any
    microseconds: float


class Shards:
    """One shard, or one a rank under tensor parallelism. Use as a context manager."""

    def __init__(
        self, model: Path, environment: Mapping[str, str], *flags: str, world_size: int = 1
    ) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="bicl-shard-")
        root = Path(self.folder.name)
        self._log = root / "log"
        environment = {**environment, "TEST_AUDIT": str(root / "audit")}
        command = [sys.executable, "-m", "text_generation_server.cli", "serve", str(model)]
        command += ["--uds-path", str(root / "socket"), *flags]
        if world_size > 1:
            command.append("--sharded")
        self.processes = []
        for rank in range(world_size):
            ranked = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
            ranked |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29600 + os.getpid() % 300)}
            with self._log.open("ab") as log:
                self.processes.append(
                    subprocess.Popen(command, env={**environment, **ranked}, stdout=log, stderr=log)
                )
        channels = [grpc.insecure_channel(f"unix://{root}/socket-{r}") for r in range(world_size)]
        self._stubs = [generate_pb2_grpc.TextGenerationServiceStub(each) for each in channels]

    def __enter__(self) -> Shards:
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.stop()

    def socket(self, rank: int) -> Path:
        return Path(self.folder.name) / f"socket-{rank}"

    def auditor(self) -> Auditor:
        """Looks into the ranks' pages; the start-up of the shard must have installed the audit."""
        return Auditor(Path(self.folder.name), len(self.processes))

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def stop(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        for rank in range(len(self.processes)):
            while not self.socket(rank).exists():
                self._check_alive()
                if time.monotonic() > deadline:
                    raise ShardFailed(f"not ready after {START_SECONDS} s: {self.log()[-3000:]}")
                time.sleep(0.1)

    def _check_alive(self) -> None:
        for process in self.processes:
            if process.poll() is not None:
                raise ShardFailed(f"ended with {process.returncode}: {self.log()[-3000:]}")

    def call(self, method: str, request: Any) -> list[Any]:
        """The same call to every rank at once."""
        futures = [getattr(s, method).future(request, timeout=CALL_SECONDS) for s in self._stubs]
        try:
            return [future.result() for future in futures]
        except grpc.RpcError as error:
            raise ShardFailed(f"{method} failed: {error}; log: {self.log()[-3000:]}") from error

    def info(self) -> Any:
        return self.call("Info", pb.InfoRequest())[0]

    def warmup(self, requests: list[Any], prefill_tokens: int, total_tokens: int) -> int:
        """Tokens that the cache holds."""
        answers = self.call(
            "Warmup",
            pb.WarmupRequest(
                batch=pb.Batch(id=0, requests=requests, size=len(requests)),
                max_input_tokens=total_tokens - 1,
                max_prefill_tokens=prefill_tokens,
                max_total_tokens=total_tokens,
            ),
        )
        return min(int(answer.max_supported_total_tokens) for answer in answers)

    def prefill(self, batch_id: int, requests: list[Any], cached: Any = None) -> Answer:
        batch = pb.Batch(id=batch_id, requests=requests, size=len(requests))
        return self._step("Prefill", pb.PrefillRequest(batch=batch, cached_batch=cached))

    def decode(self, batches: Iterable[Any]) -> Answer:
        return self._step("Decode", pb.DecodeRequest(batches=list(batches)))

    def filter(self, batch: Any, keep: Iterable[int]) -> Any:
        request = pb.FilterBatchRequest(batch_id=batch.id, request_ids=list(keep))
        return self.call("FilterBatch", request)[0].batch

    def clear(self) -> None:
        self.call("ClearCache", pb.ClearCacheRequest())

    def _step(self, method: str, request: Any) -> Answer:
        answers = self.call(method, request)
        tokens, logprobs, tops, finished = {}, {}, {}, set()
        for generation in (g for answer in answers for g in answer.generations):
            tokens[generation.request_id] = list(generation.tokens.ids)
            logprobs[generation.request_id] = list(generation.tokens.logprobs)
            tops[generation.request_id] = [
                dict(zip(top.ids, top.logprobs, strict=True)) for top in generation.top_tokens
            ]
            if generation.HasField("generated_text"):
                finished.add(generation.request_id)
        batch = answers[0].batch if answers[0].HasField("batch") else None
        slowest = max(answer.total_ns for answer in answers) / 1000
        return Answer(tokens, logprobs, tops, finished, batch, slowest)
