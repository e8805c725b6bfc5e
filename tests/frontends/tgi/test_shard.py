"""TGI's real shard with the overlay, driven as its router does, on the CPU.

Runs where ``BICL_TGI_PYTHON`` names an interpreter that can import ``text_generation_server``
(``BICL_TGI_PYTHONPATH``: folders to put before its path). One process a scenario; each case of it
is a test here. ``bicl selftest`` runs the same in the image.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from bicl.frontends.tgi.selftest.scenarios import SCENARIOS

PYTHON = os.environ.get("BICL_TGI_PYTHON", "")
SERVER = Path(__file__).parents[3] / "server"
SECONDS = 900

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(SECONDS + 60),
    pytest.mark.skipif(
        not PYTHON,
        reason="BICL_TGI_PYTHON names no interpreter with text_generation_server",
    ),
]


@functools.cache
def models_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="bicl-models-")


@functools.cache
def results(scenario: str) -> dict[str, dict[str, Any]]:
    """Outcome of every case of a scenario; under "" what the process said at its end."""
    paths = [os.environ.get("BICL_TGI_PYTHONPATH", ""), str(SERVER)]
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as answers:
        command = ["-m", "bicl.frontends.tgi.selftest", scenario]
        command += ["--json", answers.name, "--models", models_folder().name]
        done = subprocess.run(
            [PYTHON, *command],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p)},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            cwd=models_folder().name,
        )
        lines = Path(answers.name).read_text().splitlines()
    found = {each["case"]: each for each in map(json.loads, lines)}
    return found | {"": {"problem": f"{done.stdout[-1000:]}\n{done.stderr[-4000:]}"}}


CASES = [
    pytest.param(name, case, id=f"{name}-{case}")
    for name, scenario in SCENARIOS.items()
    for case in ("start_and_warm_up", *scenario.cases)
]


@pytest.mark.parametrize(("scenario", "case"), CASES)
def test_shard(scenario: str, case: str) -> None:
    outcome = results(scenario)
    assert case in outcome, outcome[""]["problem"]
    assert not outcome[case]["problem"], outcome[case]["problem"]
