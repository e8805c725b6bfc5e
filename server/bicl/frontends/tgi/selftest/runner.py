"""Runs scenarios: a model, a way to start the shard, and the cases that apply."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bicl.frontends.tgi.selftest.cases import CASES, Bench
from bicl.frontends.tgi.selftest.models import Model, make_model
from bicl.frontends.tgi.selftest.router import Router, request_of
from bicl.frontends.tgi.selftest.shard import Shards, start_environment

__all__ = ["SCENARIOS", "Result", "Scenario", "run_scenario"]

PREFILL_TOKENS = 256
TOTAL_TOKENS = 512
CHUNKING = (
    "chunked_prompt",
    "chunked_prompt_beside_a_decoding_row",
    "prefix_cancelled_between_chunks",
)


@dataclass(frozen=True)
class Scenario:
    """How the shard is started.

    Attributes:
        model: name in ``models.MODELS``.
        flags, environment, world_size: of the shard.
        without: cases that cannot apply, because TGI itself lacks the feature there.
        new_tokens: generated a request.
    """

    model: str
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    world_size: int = 1
    without: tuple[str, ...] = ()
    new_tokens: int = 12

    @property
    def cases(self) -> dict[str, Callable[[Bench], None]]:
        return {name: case for name, case in CASES.items() if name not in self.without}


SCENARIOS = {
    "llama": Scenario("llama"),
    "llama-head80": Scenario("llama-head80"),
    "llama-block32": Scenario("llama", environment={"BICL_BLOCK_SIZE": "32"}),
    "llama-speculate2": Scenario("llama", ("--speculate", "2"), without=CHUNKING),
    "llama-tp2": Scenario("llama", world_size=2),
    "qwen2": Scenario("qwen2"),
    "qwen3": Scenario("qwen3", without=CHUNKING),
    "mistral-window": Scenario("mistral-window"),
    "gemma2-window": Scenario("gemma2-window"),
    "phi3-head96": Scenario("phi3-head96"),
    "gpt-neox-head80": Scenario("gpt-neox-head80"),
    "gpt2-head64": Scenario("gpt2-head64"),
    "smollm2": Scenario("smollm2", new_tokens=40),
}


@dataclass(frozen=True)
class Result:
    """Outcome of one case; ``problem`` is empty if it held."""

    scenario: str
    case: str
    seconds: float
    problem: str = ""


def run_scenario(name: str, folder: Path, hook: Path, only: str = "") -> Iterator[Result]:
    """Start the shard once and run every case of a scenario on it.

    Args:
        folder: for models; what is there already is used again.
        hook: folder of ``bicl_tgi_start.py``.
        only: run this case alone.
    """
    scenario = SCENARIOS[name]
    model = make_model(scenario.model, folder)
    environment = start_environment(hook, scenario.environment)
    begin = time.monotonic()
    with Shards(model.path, environment, *scenario.flags, world_size=scenario.world_size) as shards:
        bench = _warm_up(shards, model, scenario)
        yield Result(name, "start_and_warm_up", time.monotonic() - begin)
        for case, function in scenario.cases.items():
            if only not in ("", case):
                continue
            begin = time.monotonic()
            problem = ""
            try:
                function(bench)
            except Exception:
                problem = traceback.format_exc()
                bench.router.abandon()
            yield Result(name, case, time.monotonic() - begin, problem)


def _warm_up(shards: Shards, model: Model, scenario: Scenario) -> Bench:
    ids = [4 + i % 40 for i in range(PREFILL_TOKENS)]
    request = request_of(0, model.text(ids), PREFILL_TOKENS)
    request.stopping_parameters.max_new_tokens = TOTAL_TOKENS - PREFILL_TOKENS
    num_tokens = shards.warmup([request], PREFILL_TOKENS, TOTAL_TOKENS)
    router = Router(shards, model, num_tokens, shards.info().block_size)
    return Bench(shards, router, model, scenario.new_tokens)
