"""The self-test's own parts that need no TGI: the list of cases, the support matrix."""

from __future__ import annotations

import json
from pathlib import Path

from bicl.frontends.tgi.selftest.cases import CASES, CHUNKING
from bicl.frontends.tgi.selftest.matrix import FEATURES, ON_CARD, matrix, rows_of
from bicl.frontends.tgi.selftest.scenarios import SCENARIOS

COLUMNS = [*FEATURES, ON_CARD]
ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "bench" / "results"


def line(scenario: str, case: str, problem: str = "") -> dict[str, str]:
    return {"scenario": scenario, "case": case, "problem": problem}


def row(text: str, scenario: str) -> list[str]:
    (found,) = (x for x in text.splitlines() if x.startswith(f"| {scenario} |"))
    return [cell.strip() for cell in found.split("|")[2:-1]]


def all_held(scenario: str) -> list[dict[str, str]]:
    return [line(scenario, case) for case in ("start_and_warm_up", *SCENARIOS[scenario].cases)]


def test_every_case_has_a_column() -> None:
    listed = [case for cases in FEATURES.values() for case in cases]
    assert sorted(listed) == sorted({"start_and_warm_up", *CASES})
    assert set(CHUNKING) <= set(CASES)


def test_matrix_says_yes_only_if_every_case_held() -> None:
    marks = dict(zip(COLUMNS, row(matrix(all_held("llama")), "llama"), strict=True))
    unmarked = {name for name, mark in marks.items() if mark != "yes"}
    assert unmarked == {"adapters", "host cache", "disk cache", "tiles left out", ON_CARD}
    failed = [*all_held("llama"), line("llama", "chunked_prompt", "wrong token")]
    marks = dict(zip(COLUMNS, row(matrix(failed), "llama"), strict=True))
    assert marks["chunks"] == "NO"
    assert marks["prefixes"] == "yes"


def test_what_did_not_run_is_not_called_supported() -> None:
    assert set(row(matrix([]), "qwen2")) == {"?", "-"}
    assert set(row(matrix([]), "llama-lora")) == {"?", "-"}


def test_what_tgi_lacks_is_marked() -> None:
    marks = dict(zip(COLUMNS, row(matrix(all_held("qwen3")), "qwen3"), strict=True))
    assert marks["chunks"] == "-"
    assert marks["poisoned prefixes"] == "yes"


def test_the_card_has_a_column_of_its_own() -> None:
    checks = all_held("llama")
    assert row(matrix([], checks), "llama")[-1] == "yes"
    assert row(matrix([], checks[1:]), "llama")[-1] == f"{len(checks) - 1} of {len(checks)}"
    assert row(matrix([], []), "llama")[-1] == "?"
    checks[-1]["problem"] = "wrong token"
    assert row(matrix([], checks), "llama")[-1] == "NO"
    assert row(matrix([], checks), "llama-tp2")[-1] == "?"


def test_page_is_that_of_the_result_files() -> None:
    """``bicl.frontends.tgi.selftest.matrix bench/results/tgi-checks-*.json`` writes it."""
    on_cpu, *on_cards = sorted(RESULTS.glob("tgi-checks-*.json"))
    assert on_cpu.name == "tgi-checks-cpu.json"
    page = (ROOT / "docs" / "support-matrix.md").read_text()
    assert page == matrix(rows_of([on_cpu]), rows_of(on_cards))


def test_a_later_file_wins(tmp_path: Path) -> None:
    """A scenario that did not start, and ran afterwards."""
    for name, hour, problem in (("a-rest.json", 13, ""), ("a.json", 12, "missing")):
        row = {"scenario": "llama", "case": "start_and_warm_up", "problem": problem}
        file = {"meta": {"date": f"2026-11-30T{hour}:00:00+00:00"}, "rows": [row]}
        (tmp_path / name).write_text(json.dumps(file))
    assert [row["problem"] for row in rows_of(sorted(tmp_path.iterdir()))][-1] == ""
