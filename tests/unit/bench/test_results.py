"""What every result file tells of itself, and what none may tell of the machine."""

import itertools
import json
import re
from pathlib import Path

import pytest

from bench.kernels.machine import SOURCES, command_line, commit, sources, sources_at
from bench.kernels.shapes import DECODE_SHAPES, HEADS

ROOT = Path(__file__).resolve().parents[3]
RESULTS = sorted((ROOT / "bench" / "results").glob("*.json"))
CONTESTANTS = (
    *("floor", "bicl", "bicl-deterministic", "bicl-pdl", "bicl-fp8", "token-major"),
    *("flashinfer-p1", "flashinfer-p1-tc", "flashinfer-p64-tc", "flashinfer-batch"),
    *("fa3-p64", "fa3-p128", "sdpa-cudnn"),
)
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


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_the_commit_that_a_result_names_is_the_one_that_ran(path: Path) -> None:
    """Results before 30 November 2026, 02:30, do not say what ran but in their commit."""
    for meta in metas(json.loads(path.read_text())):
        committed = sources_at(meta["commit"])
        if "sources" in meta and committed is not None:
            assert meta["sources"] == committed


def test_the_ids_of_folders_are_gits(tmp_path: Path) -> None:
    for name in SOURCES:
        (tmp_path / name / "b").mkdir(parents=True)
        (tmp_path / name / "b.cu").write_text("kernel\n")
        (tmp_path / name / "b" / "run.sh").write_text("exit\n")
        (tmp_path / name / "b" / "run.sh").chmod(0o755)
        (tmp_path / name / "b" / "built.so").write_text("no source")
        (tmp_path / name / "__pycache__").mkdir()
    assert sources(tmp_path) == {"csrc": "0e5b5b17e0b8", "server/bicl": "0e5b5b17e0b8"}


def test_a_copy_of_the_tree_is_told_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_COMMIT", "0123456789abcdef0123")
    assert commit() == "0123456789ab"


def test_a_command_names_no_folder_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = "x --out /tmp/out/a.json --gate=/mnt/b c/d.json --heads 32/8 --ratio 0.5"
    monkeypatch.setattr("sys.argv", typed.split())
    assert command_line().endswith(" --out a.json --gate=b c/d.json --heads 32/8 --ratio 0.5")


def test_every_contestant_met_every_decode_shape_or_says_why() -> None:
    document = json.loads((ROOT / "bench" / "results" / "kernels-h200.json").read_text())
    measured = {tuple(row[k] for k in ("op", "heads", "shape", "impl")) for row in document["rows"]}
    skipped = document["meta"]["skipped"]
    wanted = itertools.product(map(str, HEADS), DECODE_SHAPES, CONTESTANTS)
    assert [
        names
        for names in wanted
        if ("decode", *names) not in measured and not skipped.get(" ".join(("decode", *names)))
    ] == []
