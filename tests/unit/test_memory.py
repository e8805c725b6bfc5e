"""Free memory inside and outside a container."""

from __future__ import annotations

from pathlib import Path

import pytest

from bicl.memory import free_host_memory


@pytest.fixture(autouse=True)
def machine(monkeypatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("", (), {"available": 1000}))


def group(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def test_machine_without_limits(tmp_path: Path) -> None:
    assert free_host_memory(tmp_path) == 1000
    files = {"memory.max": "max", "memory.current": "5", "memory.stat": "inactive_file 1"}
    assert free_host_memory(group(tmp_path, files)) == 1000


def test_limit_of_a_container_counts_and_its_file_cache_does_not(tmp_path: Path) -> None:
    files = {
        "memory.max": "600",
        "memory.current": "500",
        "memory.stat": "anon 9\ninactive_file 50",
    }
    assert free_host_memory(group(tmp_path, files)) == 150
    (tmp_path / "memory.current").write_text("700")
    assert free_host_memory(tmp_path) == 0


def test_older_control_groups(tmp_path: Path) -> None:
    files = {
        "memory/memory.limit_in_bytes": "600",
        "memory/memory.usage_in_bytes": "500",
        "memory/memory.stat": "total_inactive_file 20",
    }
    assert free_host_memory(group(tmp_path, files)) == 120


def test_limit_above_the_machine_changes_nothing(tmp_path: Path) -> None:
    files = {"memory.max": "90000", "memory.current": "5", "memory.stat": ""}
    assert free_host_memory(group(tmp_path, files)) == 1000
