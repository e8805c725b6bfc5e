"""`bicl doctor`: one line a finding, a remedy where something is missing."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from bicl import cli, doctor
from bicl.doctor import Finding, Report, Verdict
from bicl.hardware import Gpu


def test_every_part_of_the_machine_is_examined_on_one_line_each() -> None:
    result = CliRunner().invoke(cli.app, ["doctor"])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[-1] == "bicl serve can run here"
    assert len(lines) == len(doctor.CHECKS) + 1
    for name in ["python", "torch", "packages", "cpu", "memory", "disk", "shm", "gpu", "kernels"]:
        assert any(line.split()[1] == name for line in lines[:-1])
    assert all(line.split()[0] in ("ok", "warn") for line in lines[:-1])


def test_json_carries_the_same_findings() -> None:
    result = CliRunner().invoke(cli.app, ["doctor", "--json"])
    report = json.loads(result.output)
    assert report["door"] == "bicl serve"
    assert report["usable"] is True
    assert len(report["findings"]) == len(doctor.CHECKS)
    assert set(report["findings"][0]) == {"name", "verdict", "text", "remedy"}


def test_a_failed_check_means_exit_1_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = Finding("torch", Verdict.FAIL, "No module named torch", "run `make install`")
    monkeypatch.setattr(doctor, "CHECKS", (lambda: finding,))
    result = CliRunner().invoke(cli.app, ["doctor"])
    assert result.exit_code == 1
    assert "fail torch" in result.output
    assert "run `make install`" in result.output
    assert "bicl serve cannot run here" in result.output


def test_a_check_that_breaks_is_a_finding_not_a_traceback() -> None:
    def check_something() -> Finding:
        raise OSError("no such device")

    finding = doctor._guarded(check_something)()
    assert finding.verdict is Verdict.FAIL
    assert finding.name == "something"
    assert "no such device" in finding.text


def test_a_warning_does_not_make_the_machine_unusable() -> None:
    assert Report((Finding("gpu", Verdict.WARN, "none"),)).usable
    assert not Report((Finding("memory", Verdict.FAIL, "1 GiB"),)).usable


def usage(total: int) -> SimpleNamespace:
    return SimpleNamespace(total=total, free=total)


def test_a_containers_small_shm_is_named_with_its_size_and_a_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """(A66)"""
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: usage(64 * 2**20))
    finding = doctor.check_shm(tmp_path)
    assert finding.verdict is Verdict.WARN
    assert "64 MiB" in finding.text
    assert "--shm-size" in finding.remedy
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: usage(2**30))
    assert doctor.check_shm(tmp_path).verdict is Verdict.OK
    assert doctor.check_shm(tmp_path / "absent").verdict is Verdict.WARN


@pytest.mark.parametrize(
    ("gpus", "torch_sees_it", "verdict", "text"),
    [
        ([], False, Verdict.WARN, "no NVIDIA GPU is visible"),
        ([Gpu("Tesla T4", (7, 5))], True, Verdict.WARN, "older than Ampere"),
        ([Gpu("Odd", None)], True, Verdict.WARN, "does not tell its compute capability"),
        ([Gpu("NVIDIA H200", (9, 0))], True, Verdict.OK, "NVIDIA H200"),
        ([Gpu("NVIDIA H200", (9, 0))], False, Verdict.WARN, "this torch cannot use it"),
    ],
)
def test_a_gpu_is_named_with_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch,
    gpus: list[Gpu],
    torch_sees_it: bool,
    verdict: Verdict,
    text: str,
) -> None:
    monkeypatch.setattr(doctor, "find_gpus", lambda _: gpus)
    monkeypatch.setattr("torch.cuda.is_available", lambda: torch_sees_it)
    finding = doctor.check_gpu()
    assert finding.verdict is verdict
    assert text in finding.text
    assert bool(finding.remedy) == (verdict is not Verdict.OK)


def test_a_jetson_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "is_jetson", lambda: True)
    assert "Jetson" in doctor.check_gpu().text


def test_kernels_that_were_not_built_for_this_card_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    assert doctor._judge_kernels("lib", ["80", "90a"], (9, 0)).verdict is Verdict.OK
    assert doctor._judge_kernels("lib", ["sm_80"], (8, 0)).verdict is Verdict.OK
    assert doctor._judge_kernels("lib", ["80", "ptx"], (12, 0)).verdict is Verdict.OK
    missing = doctor._judge_kernels("lib", ["90a"], (8, 9))
    assert missing.verdict is Verdict.WARN
    assert "sm_89" in missing.remedy
    monkeypatch.setattr(doctor, "find_spec", lambda name: object())
    made = doctor._judge_kernels("lib", ["90a"], (8, 9))
    assert made.verdict is Verdict.OK
    assert "NVRTC compiles them for sm_89" in made.text


def test_a_manifest_that_cannot_be_read_names_no_architecture(tmp_path: Path) -> None:
    library = tmp_path / "lib.so"
    assert doctor._built_architectures(library) == []
    library.with_suffix(".json").write_text('{"archs": ["90a", 80]}')
    assert doctor._built_architectures(library) == ["90a", "80"]


def test_little_memory_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    little = SimpleNamespace(available=2**29, total=2**30)
    monkeypatch.setattr("psutil.virtual_memory", lambda: little)
    assert doctor.check_memory().verdict is Verdict.FAIL


def test_a_missing_package_is_a_failure_with_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def version(name: str) -> str:
        if name == "uvicorn":
            raise doctor.importlib.metadata.PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(doctor.importlib.metadata, "version", version)
    finding = doctor.check_server_packages()
    assert finding.verdict is Verdict.FAIL
    assert finding.text == "missing: uvicorn"
    assert "pip install" in finding.remedy
