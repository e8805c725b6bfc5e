"""HySparse's flags."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bicl.config import ServerConfig
from bicl.errors import ConfigError
from bicl.sparse.config import HySparseConfig
from bicl.sparse.settings import HySparseSettings, read_config_file, write_config_file

ON: dict[str, Any] = {"enable_hysparse": True}


def refusal(**flags: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        HySparseSettings(**flags)
    return str(caught.value)


def test_off_unless_enabled() -> None:
    assert HySparseSettings().resolve() is None
    assert HySparseSettings(**ON).resolve() == HySparseConfig()


def test_flags_set_the_fields() -> None:
    settings = HySparseSettings(
        **ON,
        hysparse_sparsity_ratio=0.7,
        hysparse_layers="8-23",
        hysparse_max_k=100,
        hysparse_mode="compact",
        hysparse_floor_tokens=0,
        hysparse_min_skipped_mb=0,
        hysparse_gate="gate.safetensors",
        hysparse_kind_rules="code=0.8:4",
        hysparse_force=True,
        hysparse_min_mass_kept=0.8,
    )
    assert settings.resolve() == HySparseConfig(
        sparsity_ratio=0.7,
        layers="8-23",
        max_k=100,
        mode="compact",
        floor_tokens=0,
        min_skipped_mb=0,
        gate_path="gate.safetensors",
        kind_rules="code=0.8:4",
        force=True,
    )
    assert settings.guard().min_mass_kept == 0.8


def test_serve_takes_them_from_flags_and_environment() -> None:
    config = ServerConfig.from_sources(
        {"model_id": "m", "hysparse_max_k": 64},
        {"BICL_ENABLE_HYSPARSE": "true", "BICL_HYSPARSE_SPARSITY_RATIO": "0.5"},
    )
    assert config.hysparse.resolve() == HySparseConfig(sparsity_ratio=0.5, max_k=64)


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ({"hysparse_max_k": 9}, ["--hysparse-max-k needs --enable-hysparse"]),
        ({"hysparse_min_mass_kept": 0.7}, ["--hysparse-min-mass-kept needs --enable-hysparse"]),
        (ON | {"hysparse_sparsity_ratio": 0.99}, ["--hysparse-sparsity-ratio 0.99", "0.95"]),
        (ON | {"hysparse_layers": "x"}, ["--hysparse-layers x", "10-28"]),
        (ON | {"hysparse_mode": "fast"}, ["--hysparse-mode fast", "select, compact"]),
        (ON | {"hysparse_max_k": 2}, ["--hysparse-max-k 2", "at least 4"]),
        (
            ON | {"hysparse_kind_rules": "code=2"},
            ["--hysparse-kind-rules code=2", "0 (dense) to 1"],
        ),
        (ON | {"hysparse_kind_rules": "code=1:1"}, ["--hysparse-kind-rules", "1 windows of code"]),
        (ON | {"hysparse_min_skipped_mb": -1}, ["--hysparse-min-skipped-mb -1", "use 32"]),
        (ON | {"hysparse_min_mass_kept": 2.0}, ["--hysparse-min-mass-kept", "0 (never) to 1"]),
        (ON | {"hysparse_config": "/nowhere"}, ["--hysparse-config /nowhere", "tune"]),
    ],
    ids=str,
)
def test_wrong_values_are_refused_by_flag(flags: dict[str, Any], parts: list[str]) -> None:
    """(A72)"""
    message = refusal(**flags)
    for part in parts:
        assert part in message


def test_a_config_file_is_the_base_and_flags_win(tmp_path: Path) -> None:
    path = tmp_path / "hysparse.json"
    tuned = HySparseConfig(sparsity_ratio=0.55, layers="4,9-12/16", max_k=99)
    write_config_file(path, tuned, accuracy_drop=0.002)
    assert read_config_file(path) == tuned
    assert json.loads(path.read_text())["accuracy_drop"] == 0.002
    settings = HySparseSettings(**ON, hysparse_config=str(path), hysparse_max_k=50)
    assert settings.resolve() == replace(tuned, max_k=50)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"hysparse": {"sparsity": 0.5}}', '{"hysparse": {"max_k": -1}}']
)
def test_a_file_with_something_else_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="--hysparse-config"):
        read_config_file(path)
