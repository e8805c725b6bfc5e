"""docs/tgi.md, held to the code: messages, flags and variables."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from bench.tgi.summary import (
    BEFORE,
    DEFAULT,
    HOST_CACHE_STEPS,
    HOST_STEPS,
    KERNELS,
    LOGITS,
    SOAKS,
    attention_rows,
    host_cache_table,
    host_steps_table,
    load,
    logits_table,
    misses_table,
    parts_table,
    rows_of,
    soak_rows,
    soak_table,
    split_table,
    step_table,
)
from bicl.launcher.flags import OUR_FLAGS

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "tgi.md").read_text()
FOLDERS = ("server/bicl/frontends/tgi", "server/bicl/launcher", "patches/hook")
SOURCES = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]


def strings(node: ast.AST) -> str:
    """A string's text; what is formatted in is one U+FFFC."""
    if isinstance(node, ast.JoinedStr):
        return "".join(strings(value) for value in node.values)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return "\ufffc"


def said() -> list[str]:
    trees = (ast.walk(ast.parse(path.read_text())) for path in SOURCES)
    kinds = (ast.JoinedStr, ast.Constant)
    return [strings(node) for tree in trees for node in tree if isinstance(node, kinds)]


def messages() -> list[str]:
    table = PAGE.partition("## Messages")[2]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]


@pytest.mark.parametrize("message", messages())
def test_message_is_one_that_the_code_says(message: str) -> None:
    pattern = re.escape(message).replace(r"\.\.\.", ".*").replace(r"\ N\ ", " .* ")
    fixed = re.sub(r"^bicl_tgi_start\\.pth", "", pattern)  # made of a constant
    fixed = fixed.replace("ATTENTION=flashdecoding", ".*")
    assert any(re.search(fixed, text) for text in said()), message


def test_flags_and_variables_are_documented() -> None:
    for flag in OUR_FLAGS:
        assert flag.name in PAGE, flag.name
    read = {name for path in SOURCES for name in re.findall(r"BICL_[A-Z_]+[A-Z]", path.read_text())}
    for name in read - {"BICL_TGI"} - {flag.env for flag in OUR_FLAGS}:  # named like their flags
        assert name in PAGE, name


def test_tables_are_those_of_the_result_files() -> None:
    """Of the last run, not of one before: ``python -m bench.tgi.summary`` prints them."""
    steps = load(ROOT / DEFAULT)
    split = split_table(steps, attention_rows(ROOT / KERNELS))
    misses = misses_table(steps, *(load(ROOT / path) for path in BEFORE))
    beside = host_cache_table(rows_of(ROOT / HOST_CACHE_STEPS))
    soak = soak_table(soak_rows(*(ROOT / path for path in SOAKS)))
    host = host_steps_table(load(ROOT / HOST_STEPS))
    logits = logits_table(rows_of(ROOT / LOGITS))
    for table in (step_table(steps), parts_table(steps), split, misses, host, beside, logits, soak):
        assert table in PAGE


def test_releases_that_ran_are_those_of_the_result_files() -> None:
    for path in (ROOT / "bench" / "results").glob("tgi-release-*.json"):
        name, found = path.stem.removeprefix("tgi-release-"), json.loads(path.read_text())
        first, _, last = found["meta"]["tgi"].partition("-")
        assert first <= name <= (last or first)
        problems = [row["problem"] for row in found["rows"] if "case" in row]
        assert not any(problems)
        (line,) = (x for x in PAGE.splitlines() if name in x and "cases each" in x)
        assert f": {len(problems)} cases each" in line
