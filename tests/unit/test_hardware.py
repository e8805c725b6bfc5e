"""The hardware gate: one clear sentence, never a kernel crash. (A46)"""

from __future__ import annotations

from pathlib import Path

import pytest

from bicl.hardware import Gpu, find_gpus, judge

H200, L4, T4 = Gpu("H200", (9, 0)), Gpu("L4", (8, 9)), Gpu("T4", (7, 5))


@pytest.mark.parametrize("gpus", [[H200], [L4], [H200, L4], [Gpu("B200", (10, 0))]])
def test_ampere_and_newer_are_usable(gpus: list[Gpu]) -> None:
    assert judge(gpus).usable


@pytest.mark.parametrize(
    ("gpus", "jetson", "words"),
    [
        ([], False, "no NVIDIA GPU is visible.*--gpus all"),
        ([T4], False, "T4 has compute capability 7.5, older than Ampere; 8.0 or newer"),
        ([H200, T4], False, "T4"),
        ([Gpu("odd", None)], False, "odd does not tell its compute capability"),
        ([Gpu("Orin", (8, 7))], True, "Jetson"),
    ],
)
def test_what_is_missing_is_said(gpus: list[Gpu], jetson: bool, words: str) -> None:
    verdict = judge(gpus, jetson=jetson)
    assert not verdict.usable
    assert __import__("re").search(words, verdict.missing)


@pytest.fixture
def driver(tmp_path: Path) -> dict[str, str]:
    """An environment whose nvidia-smi knows three cards."""
    tool = tmp_path / "nvidia-smi"
    rows = (
        "0, GPU-aaa1, 9.0, NVIDIA H200",
        "1, GPU-bbb2, 7.5, Tesla T4",
        "2, GPU-ccc3, [N/A], Odd",
    )
    tool.write_text("#!/bin/sh\n" + "".join(f"echo '{row}'\n" for row in rows))
    tool.chmod(0o755)
    return {"PATH": f"{tmp_path}:/usr/bin:/bin"}


def test_driver_is_asked_for_names_and_capabilities(driver: dict[str, str]) -> None:
    expected = [Gpu("NVIDIA H200", (9, 0)), Gpu("Tesla T4", (7, 5)), Gpu("Odd", None)]
    assert find_gpus(driver) == expected


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("", []),
        ("0", ["NVIDIA H200"]),
        ("1,0", ["NVIDIA H200", "Tesla T4"]),
        ("GPU-bbb", ["Tesla T4"]),
    ],
)
def test_invisible_cards_do_not_count(
    driver: dict[str, str], visible: str, names: list[str]
) -> None:
    assert [g.name for g in find_gpus({**driver, "CUDA_VISIBLE_DEVICES": visible})] == names


def test_no_driver_means_no_gpu(tmp_path: Path) -> None:
    assert find_gpus({"PATH": str(tmp_path)}) == []


def test_failing_driver_means_no_gpu(tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexit 9\n")
    tool.chmod(0o755)
    assert find_gpus({"PATH": f"{tmp_path}:/usr/bin:/bin"}) == []
