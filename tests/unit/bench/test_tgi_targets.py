"""Targets of a decode step in TGI's shard: what is met, missed, and not measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.tgi.summary import (
    load,
    misses_table,
    parts_table,
    split_table,
    step_table,
    verdicts,
)


def steps_of(tmp_path: Path, *rows: dict[str, Any]) -> Any:
    path = tmp_path / "steps.json"
    path.write_text(json.dumps({"meta": {}, "rows": rows}))
    return load(path)


def row(shape: str, impl: str, us: float, **parts: float) -> dict[str, Any]:
    return {"op": "step", "shape": shape, "impl": impl, "us": us, **parts}


@pytest.mark.parametrize(
    ("shape", "least"), [("1x1024", 1.2), ("32x4096", 1.3), ("8x16384", 1.3), ("32x16384", 1.4)]
)
def test_larger_gains_are_promised_where_attention_weighs_more(
    tmp_path: Path, shape: str, least: float
) -> None:
    steps = steps_of(tmp_path, row(shape, "bicl", 100.0), row(shape, "flashinfer-p1", 125.0))
    over_default = next(iter(verdicts(steps)))
    assert over_default == (f"{shape} over TGI's default", 1.25, least)


def test_a_missing_row_is_no_pass(tmp_path: Path) -> None:
    found = list(verdicts(steps_of(tmp_path, row("32x4096", "bicl", 100.0))))
    assert [value for _, value, _ in found] == [None, None, None]
    assert "| 32x4096 | **0.10** | - | - | - | - | - | - |" in step_table(
        steps_of(tmp_path, row("32x4096", "bicl", 100.0))
    )


def test_the_gain_is_told_apart_into_gpu_and_host(tmp_path: Path) -> None:
    ours = row("1x1024", "bicl", 5000, before_us=200, graph_us=4500, after_us=300)
    theirs = row("1x1024", "flashinfer-p1", 6500, before_us=1000, graph_us=5000, after_us=500)
    last = parts_table(steps_of(tmp_path, ours, theirs)).splitlines()[-1]
    assert last.endswith("| 0.50 | 1.00 |")


def test_the_gpus_gain_is_told_apart_into_kernel_layout_and_store(tmp_path: Path) -> None:
    ours = row("1x4096", "bicl", 5000, before_us=200, graph_us=4500, after_us=300)
    theirs = row("1x4096", "flashinfer-p1", 6500, before_us=1000, graph_us=5000, after_us=500)
    steps = steps_of(tmp_path, ours, theirs)
    layer = {"bicl": {"us": 8.0}, "token-major": {"us": 9.0}, "flashinfer-p1": {"us": 19.0}}
    last = split_table(steps, {"1x4096": layer}).splitlines()[-1]
    assert last == "| 1x4096 | 1.50 | 1.00 | 0.50 | 0.32 | 0.03 | 0.15 |"
    del layer["token-major"]
    assert "1x4096" not in split_table(steps, {"1x4096": layer})


def test_a_target_that_one_run_missed_is_shown_in_all(tmp_path: Path) -> None:
    def run(default: float) -> Any:
        rows = [row("1x1024", "bicl", 100), row("1x1024", "flashinfer-p1", default)]
        return steps_of(tmp_path, *rows, row("1x1024", "flashinfer-p1-tc", 110))

    line = "| 1x1024 over TGI's default | 1.250x | 1.190x | 1.2 |"
    assert misses_table(run(125), run(119)).splitlines()[2:] == [line]
    assert misses_table(run(125), run(121)).splitlines()[2:] == []
