"""Runs scenarios: a model, a way to start the shard, and the cases that apply."""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bicl.frontends.tgi.selftest.bench import PREFILL_TOKENS, TOTAL_TOKENS, Bench
from bicl.frontends.tgi.selftest.models import Model, make_model
from bicl.frontends.tgi.selftest.router import Router, request_of
from bicl.frontends.tgi.selftest.scenarios import SCENARIOS, Scenario
from bicl.frontends.tgi.selftest.shard import Shards, start_environment

__all__ = ["Result", "run_scenario"]

START = "start_and_warm_up"


@dataclass(frozen=True)
class Result:
    """Outcome of one case; ``problem`` is empty if it held."""

    scenario: str
    case: str
    seconds: float
    problem: str = ""


def run_scenario(
    name: str, folder: Path, hook: Path, only: Collection[str] = ()
) -> Iterator[Result]:
    """Start the shard once and run every case of a scenario on it.

    Args:
        folder: for models; what is there already is used again.
        hook: folder of ``bicl_tgi_start.py``.
        only: run these cases; by default all.
    """
    scenario, begin = SCENARIOS[name], time.monotonic()
    memory = {"TEST_FREE_MEMORY": str(scenario.free_bytes)}
    environment = start_environment(hook, {**scenario.environment, **memory})
    with ExitStack() as stack:
        try:
            model = make_model(scenario.model, folder)
            adapters = [f"{each}={model.path / each}" for each in scenario.adapters]
            environment["LORA_ADAPTERS"] = ",".join(adapters)
            if scenario.disk_cache:
                disk = stack.enter_context(tempfile.TemporaryDirectory(prefix="bicl-disk-"))
                environment["BICL_DISK_CACHE_DIR"] = disk

            def start() -> Bench:
                shards = Shards(
                    model.path, environment, *scenario.flags, world_size=scenario.world_size
                )
                return _warm_up(stack.enter_context(shards), model, scenario)

            def restart() -> None:
                while not all(bench.shards.auditor().settled()):
                    time.sleep(0.05)
                bench.shards.stop()
                fresh = start()
                bench.shards, bench.router = fresh.shards, fresh.router

            bench = start()
            bench.restart = restart
        except Exception:
            yield Result(name, START, time.monotonic() - begin, traceback.format_exc())
            return
        yield Result(name, START, time.monotonic() - begin)
        for case, function in scenario.cases.items():
            if not only or case in only:
                yield _run_case(name, case, function, bench)


def _run_case(scenario: str, case: str, function: Callable[[Bench], None], bench: Bench) -> Result:
    begin = time.monotonic()
    try:
        function(bench)
    except Exception:
        bench.router.abandon()
        return Result(scenario, case, time.monotonic() - begin, traceback.format_exc())
    return Result(scenario, case, time.monotonic() - begin)


def _warm_up(shards: Shards, model: Model, scenario: Scenario) -> Bench:
    text = model.text(model.prompt(PREFILL_TOKENS, "warm-up"))
    request = request_of(0, text, PREFILL_TOKENS)
    request.stopping_parameters.max_new_tokens = TOTAL_TOKENS - PREFILL_TOKENS
    num_tokens = shards.warmup([request], PREFILL_TOKENS, TOTAL_TOKENS)
    return Bench(
        shards=shards,
        router=Router(shards, model, num_tokens, shards.info().block_size),
        model=model,
        num_tokens=num_tokens,
        free_bytes=scenario.free_bytes,
        kv_bytes=scenario.kv_bytes,
        exact=scenario.exact,
        new_tokens=scenario.new_tokens,
        prefixes=scenario.prefixes,
    )
