"""Runs scenarios: a model, a way to start the shard, and the cases that apply."""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bicl.frontends.tgi.selftest.bench import PREFILL_TOKENS, TOTAL_TOKENS, Bench
from bicl.frontends.tgi.selftest.models import Model, make_model
from bicl.frontends.tgi.selftest.router import Router, request_of
from bicl.frontends.tgi.selftest.scenarios import SCENARIOS, Scenario
from bicl.frontends.tgi.selftest.shard import Shards, start_environment

__all__ = ["START", "Machine", "Result", "on_cpu", "run_cases", "run_scenario", "running"]

START = "start_and_warm_up"


@dataclass(frozen=True)
class Result:
    """Outcome of one case; ``problem`` is empty if it held."""

    scenario: str
    case: str
    seconds: float
    problem: str = ""


@dataclass(frozen=True)
class Machine:
    """Where scenarios run.

    Attributes:
        environment: of the shards, with the start-up hook on their path.
        flags: of the shards, beside the scenario's.
        half: they compute in half precision: tokens are those of the same prompt alone, or as
            likely (of one rank, where there are several); with adapters those of transformers, for
            a shard that leaves them out agrees with itself.
    """

    environment: Mapping[str, str]
    flags: tuple[str, ...] = ()
    half: bool = False


def on_cpu(hook: Path) -> Machine:
    """Float32 on the CPU. ``hook``: folder of ``bicl_tgi_start.py``."""
    return Machine(start_environment(hook, {}))


def run_scenario(
    name: str, folder: Path, machine: Machine, only: Collection[str] = ()
) -> Iterator[Result]:
    """Start the shard once and run every case of a scenario on it.

    Args:
        folder: for models; what is there already is used again.
        only: run these cases; by default all.
    """
    begin = time.monotonic()
    with ExitStack() as stack:
        try:
            bench = stack.enter_context(running(name, folder, machine))
        except Exception:
            yield Result(name, START, time.monotonic() - begin, traceback.format_exc())
            return
        yield Result(name, START, time.monotonic() - begin)
        yield from run_cases(name, bench, only)


def run_cases(name: str, bench: Bench, only: Collection[str] = ()) -> Iterator[Result]:
    """Every case of a scenario, or those of ``only``, on a running shard."""
    for case, function in SCENARIOS[name].cases.items():
        if only and case not in only:
            continue
        begin, problem = time.monotonic(), ""
        try:
            function(bench)
        except Exception:
            problem = traceback.format_exc()
            bench.router.abandon()
        yield Result(name, case, time.monotonic() - begin, problem)


@contextmanager
def running(name: str, folder: Path, machine: Machine) -> Iterator[Bench]:
    """A scenario's shards, warmed up; stopped at the end, those of a restart too."""
    scenario = SCENARIOS[name]
    model = make_model(scenario.model, folder)
    with ExitStack() as stack:
        adapters = [f"{each}={model.path / each}" for each in scenario.adapters]
        plain = {
            **machine.environment,
            "TEST_FREE_MEMORY": str(scenario.free_bytes),
            "LORA_ADAPTERS": ",".join(adapters),
        }
        environment = {**plain, **scenario.environment}
        if scenario.disk_cache:
            disk = stack.enter_context(tempfile.TemporaryDirectory(prefix="bicl-disk-"))
            environment["BICL_DISK_CACHE_DIR"] = disk
        if not scenario.exact:
            environment["TEST_AUDIT_EVERY"] = "0"
        flags = (*machine.flags, *scenario.flags)

        def start(environment: Mapping[str, str], world_size: int) -> Shards:
            shards = Shards(model.path, environment, *flags, world_size=world_size)
            stack.callback(shards.stop)
            return shards

        def warm_up(shards: Shards) -> Bench:
            return _warm_up(shards.__enter__(), model, scenario, machine.half)

        def restart() -> None:
            while not all(bench.shards.auditor().settled()):
                time.sleep(0.05)
            bench.shards.stop()
            fresh = warm_up(start(environment, scenario.world_size))
            bench.shards, bench.router = fresh.shards, fresh.router

        several = machine.half and scenario.world_size > 1
        one = start(plain, 1) if several else None
        bench = warm_up(start(environment, scenario.world_size))
        bench.restart = restart
        bench.alone = warm_up(one).router if one else None
        yield bench


def _warm_up(shards: Shards, model: Model, scenario: Scenario, half: bool) -> Bench:
    text = model.text(model.prompt(PREFILL_TOKENS, "warm-up"))
    request = request_of(0, text, PREFILL_TOKENS)
    request.stopping_parameters.max_new_tokens = TOTAL_TOKENS - PREFILL_TOKENS
    num_tokens = shards.warmup([request], PREFILL_TOKENS, TOTAL_TOKENS)
    bench = Bench(
        shards=shards,
        router=Router(shards, model, num_tokens, shards.info().block_size),
        model=model,
        num_tokens=num_tokens,
        free_bytes=scenario.free_bytes,
        kv_bytes=scenario.kv_bytes,
        exact=scenario.exact,
        lossy=not scenario.exact,
        new_tokens=scenario.new_tokens,
        prefixes=scenario.prefixes,
    )
    if half:
        bench.kv_bytes = min(scenario.kv_bytes, 2)
        bench.exact = bool(scenario.adapters)
        bench.half = True
    return bench
