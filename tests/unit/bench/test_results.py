"""What every result file tells of itself, and what none may tell of the machine."""

import json
import re
from pathlib import Path

import pytest

RESULTS = sorted((Path(__file__).resolve().parents[3] / "bench" / "results").glob("*.json"))
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:home|root|tmp|work|mnt|Users)/")


def metas(document: dict) -> list[dict]:
    """A file holds one run, or ``runs`` of them."""
    return [run["meta"] for run in document.get("runs", [document])]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_names_its_command_commit_and_day(path: Path) -> None:
    for meta in metas(json.loads(path.read_text())):
        assert meta["command"].startswith("python -m bench."), meta["command"]
        assert re.match(r"[0-9a-f]{7,}", meta["commit"] or ""), meta["commit"]
        assert re.match(r"20\d\d-\d\d-\d\d", meta["date"]), meta["date"]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_names_no_folder_of_a_machine(path: Path) -> None:
    assert not MACHINE_PATH.findall(path.read_text())
