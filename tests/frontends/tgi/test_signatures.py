"""Names and signatures that TGI's models call, kept as facts in contract.json."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
from pathlib import Path

import pytest

from bicl.frontends.tgi import config

HERE = Path(__file__).parent
CONTRACT = json.loads((HERE / "contract.json").read_text())
OVERLAY = HERE.parents[2] / "patches" / "overlay"
CALLABLES = [
    (module, name, expected)
    for module in ("kv_cache", "attention")
    for name, expected in CONTRACT[module].items()
]


def written(signature: inspect.Signature) -> list[str]:
    words, starred = [], False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            words.append("*")
            starred = True
        default = parameter.default
        suffix = "" if default is parameter.empty else f"={default}"
        words.append(parameter.name + suffix)
    return words


@pytest.mark.parametrize(("module", "name", "expected"), CALLABLES)
def test_signature_is_the_one_tgi_calls(module: str, name: str, expected: list[str]) -> None:
    found = importlib.import_module(f"bicl.frontends.tgi.{module}")
    for part in name.split("."):
        found = getattr(found, part)
    assert written(inspect.signature(found)) == expected


def test_windows_are_supported_and_the_attention_name_is_one_the_router_knows() -> None:
    attention = importlib.import_module("bicl.frontends.tgi.attention")
    assert attention.SUPPORTS_WINDOWING is CONTRACT["constants"]["attention.SUPPORTS_WINDOWING"]
    assert CONTRACT["constants"]["attention_name"] == config.ATTENTION


@pytest.mark.parametrize(
    ("file", "names"),
    [
        ("kv_cache.py", {"KVCache", "KVScales", "get_kv_scales"}),
        ("cuda.py", {"SUPPORTS_WINDOWING", "attention", "paged_attention"}),
        ("ipex.py", {"SUPPORTS_WINDOWING", "attention", "paged_attention"}),
    ],
)
def test_overlay_module_only_renames(file: str, names: set[str]) -> None:
    body = ast.parse((OVERLAY / file).read_text()).body
    kinds = [type(node).__name__ for node in body]
    assert kinds == ["Expr", "ImportFrom", "Assign"]
    assert {alias.name for alias in body[1].names} == names  # type: ignore[attr-defined]
