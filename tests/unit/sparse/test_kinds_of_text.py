"""Kinds of text, and where the parts of code and structured text begin."""

from __future__ import annotations

import inspect

import pytest

from bicl.cache import manager
from bicl.errors import ConfigError
from bicl.sparse import syntax
from bicl.sparse.config import TEXT_KINDS, HySparseConfig
from bicl.sparse.policy import KIND_RULES, KindRule, classify, parse_kind_rules
from bicl.sparse.selection import SelectionRule
from bicl.sparse.syntax import boundaries, require_parser, to_tokens

PYTHON = inspect.getsource(manager)
JAVASCRIPT = """
import { readFile } from 'fs';

class Reader {
  constructor(path) {
    this.path = path;
  }
  async read() {
    return readFile(this.path);
  }
}
export function open(path) {
  return new Reader(path);
}
"""
LAW = """
1. Definitions. In this Agreement the Company shall mean the party named herein.
2. Term. This Agreement shall commence pursuant to Section 3 and shall continue thereafter.
(a) Notwithstanding the foregoing, the Licensee shall indemnify the Licensor.
(b) Any covenant hereto shall survive.
Section 3 Jurisdiction. The Parties hereby submit to the jurisdiction of the Court.
"""
LICENCE = """
You may reproduce and distribute copies of the Work in any medium, with or without modifications,
provided that You give any other recipients a copy of this License and keep all copyright notices.
Unless required by law, the Licensor provides the Work "as is", without warranties of any kind, and
is not liable to You for damages, whatever the legal theory.
"""
NEWS = (
    "LONDON (Reuters) - Officials said on Monday that prices rose by 3 percent. A spokesman told "
    "reporters that the figures, announced on Friday, were according to plan. "
)
CHAT = "<|im_start|>user\nHow do I boil an egg?<|im_end|>\n<|im_start|>assistant\n"
PROSE = "The lighthouse stood on a rock, and the sea went round it day and night. " * 20


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (PYTHON, "code"),
        (JAVASCRIPT, "code"),
        ('{\n "a": 1,\n "b": [\n 2,\n 3\n ],\n "c": {\n "d": 4\n }\n}', "code"),
        (LAW, "legal"),
        (LICENCE, "legal"),
        (NEWS, "news"),
        (CHAT, "chat"),
        ("user: hi\nassistant: hello", "chat"),
        ("Alice: hi\nBob: hello\n", "chat"),
        (PROSE, "other"),
        ("", "other"),
    ],
    ids=[
        "python",
        "javascript",
        "json",
        "law",
        "licence",
        "news",
        "template",
        "roles",
        "names",
        "prose",
        "-",
    ],
)
def test_texts_are_told_apart(text: str, kind: str) -> None:
    assert classify(text) == kind


def test_no_kind_is_left_out_of_more_than_was_configured() -> None:
    assert set(KIND_RULES) == set(TEXT_KINDS) - {"auto", "off"} | {"other"}
    assert all(0.0 < rule.share <= 1.0 for rule in KIND_RULES.values())


def test_kind_rules_change_what_they_name() -> None:
    rules = parse_kind_rules("code=0.7:4, chat=.9, legal=0")
    assert rules["code"] == KindRule(0.7, 4)
    assert rules["chat"] == KindRule(0.9, 0)
    assert rules["legal"] == KindRule(0.0, 0)
    assert rules["news"] == KIND_RULES["news"]
    assert parse_kind_rules("") == KIND_RULES


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("code", "KIND=SHARE"),
        ("poems=0.5", "chat, news, other, code, legal"),
        ("code=1.2", "0 (dense) to 1"),
        ("code=0.5:x", "code=0.85:4"),
        ("code=0.5,", "KIND=SHARE"),
    ],
)
def test_wrong_kind_rules_are_refused(text: str, part: str) -> None:
    with pytest.raises(ConfigError, match="kind_rules") as caught:
        parse_kind_rules(text)
    assert part in str(caught.value)


@pytest.mark.parametrize(("windows", "fits"), [(1, False), (2, True), (8, True), (9, False)])
def test_windows_of_a_kind_are_no_fewer_than_of_all_and_leave_room(windows: int, fits) -> None:
    changes = {"kind_rules": f"code=1:{windows}", "max_k": 10, "floor_tokens": 0, "recent": 2}
    if fits:
        assert HySparseConfig(**changes).kind_rule("code").windows == windows
    else:
        with pytest.raises(ConfigError, match=f"{windows} windows of code"):
            HySparseConfig(**changes)


@pytest.mark.parametrize(("page_size", "tiles"), [(64, 5), (32, 10)])
def test_a_rule_with_more_windows_counts_them_in_pages(page_size: int, tiles: int) -> None:
    rule = SelectionRule.of(HySparseConfig(), page_size)
    assert rule.with_windows(5).recent == tiles
    assert rule.with_windows(0) == rule.with_windows(2) == rule


def lines_at(text: str, places: list[int]) -> list[str]:
    return [text[place : text.index("\n", place)] for place in places]


def test_definitions_begin_boundaries_outermost_first() -> None:
    found = lines_at(PYTHON, boundaries(PYTHON, code=True))
    begins = {
        name: [line.startswith(name) for line in found]
        for name in (
            "class CacheManager(",
            "def acquire(",
            "def extend(",
            "def commit(",
            "def release(",
        )
    }
    assert all(map(any, begins.values())), begins
    first = [places.index(True) for places in begins.values()]
    assert min(first) == first[0]


def test_the_language_is_guessed_from_the_text() -> None:
    found = lines_at(JAVASCRIPT, boundaries(JAVASCRIPT, code=True))
    assert found[:3] == [
        "import { readFile } from 'fs';",
        "class Reader {",
        "export function open(path) {",
    ]
    assert "async read() {" in found


def test_places_count_characters_not_bytes() -> None:
    text = 'naïve = "ünïcödé"\n\n\ndef f():\n    pass\n'
    assert "def f():" in lines_at(text, boundaries(text, code=True))


def test_fenced_blocks_of_a_chat_are_code() -> None:
    text = f"Please review:\n```python\n{PYTHON[:3000]}\n```\nThanks.\n"
    assert any(
        line.startswith("class CacheManager")
        for line in lines_at(text, boundaries(text, code=False))
    )


def test_clauses_and_headings_begin_boundaries() -> None:
    found = [line[:12] for line in lines_at(LAW, boundaries(LAW, code=False))]
    assert found == ["1. Definitio", "2. Term. Thi", "(a) Notwiths", "(b) Any cove", "Section 3 Ju"]


def test_text_without_structure_has_no_boundaries() -> None:
    assert boundaries(PROSE, code=False) == []


def test_characters_become_tokens_in_order_of_importance() -> None:
    assert to_tokens([9, 0, 4, 5], [0, 4, 8]) == [2, 0, 1]


def test_without_the_parser_it_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syntax, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"--hysparse-enable-sg needs tree-sitter.*bicl\[syntax\]"
    ):
        require_parser()
