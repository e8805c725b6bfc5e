"""What the sanitizer's script makes of a report. Needs no GPU."""

from __future__ import annotations

import subprocess

import pytest
from sanitize import SUMMARY, Verdict, examine

CLEAN = "ran decode\n========= ERROR SUMMARY: 0 errors\n"
RACES = "ran decode\n========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)\n"


def verdict(report: str, group: str = "decode") -> Verdict:
    found = SUMMARY.search(report)
    return Verdict("memcheck", group, int(found[1]) if found else None, 1.0, report)


@pytest.mark.parametrize(
    ("report", "as_wished"),
    [
        (CLEAN, True),
        (RACES, False),
        (CLEAN.replace("ran decode\n", ""), False),  # it stopped before the kernels had run
        ("ran decode\n", False),  # the tool itself failed
    ],
)
def test_only_a_whole_run_without_faults_is_clean(report: str, as_wished: bool) -> None:
    assert verdict(report).as_wished is as_wished


def test_a_run_that_misses_the_canarys_faults_fails() -> None:
    assert not verdict(CLEAN, "canary").as_wished
    assert verdict(RACES, "canary").as_wished


def test_a_tool_that_hangs_is_stopped_with_what_it_runs(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text("#!/bin/sh\nsleep 60 & echo started $!\nwait\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = examine("memcheck", "decode", tmp_path / "none.so", limit=1)
    assert "stopped after 1 s" in found.report
    assert not found.as_wished
    child = found.report.split("started ")[1].split()[0]
    alive = subprocess.run(["ps", "-o", "stat=", "-p", child], capture_output=True, text=True)
    assert alive.stdout.strip()[:1] in ("", "Z")
