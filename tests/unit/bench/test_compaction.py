"""The study of quality compacts as the server does, and the page tells what it found."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import torch

from bench.hysparse.compaction import compaction
from bench.hysparse.decoding import Context
from bench.hysparse.report import RATIO
from bicl.sparse.compact import OBSERVED, choose_tokens, token_scores, tokens_to_keep
from bicl.sparse.selection import SelectionRule
from bicl.sparse.variants import DecodeRows

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "bench" / "results"
PAGE = (ROOT / "docs" / "hysparse.md").read_text()
RULE = SelectionRule(page_size=64, max_k=512, first=1, recent=2, floor=0)
TOKENS = 64 * 20 + 17
TITLES = {
    "dense": "dense",
    "compact served": "`compact`, as served",
    "compact": "`compact`, floor off",
    "centroids served pages-32": "`select`, as served",
    "kvpress ChunkKV-SnapKV": "ChunkKV-SnapKV",
    "kvpress StreamingLLM": "StreamingLLM",
    "kvpress SnapKV": "SnapKV",
    "kvpress TOVA": "TOVA",
}


def test_the_study_keeps_what_the_server_keeps() -> None:
    generator = torch.Generator().manual_seed(2)
    key = torch.randn(TOKENS, 2, 16, generator=generator)
    query = torch.randn(TOKENS, 4, 16, generator=generator)
    context = Context(torch.zeros(TOKENS), {3: key}, queries={3: query})
    keep = compaction(context, [0.3, 0.65], RULE, rows=2)
    length = torch.full((4,), TOKENS + 1, dtype=torch.int32)
    kept = keep(3, DecodeRows(query[:3], key, length[:3] - 1, length[:3], 0.25), slice(1, 4))
    scores, _ = token_scores(query[-OBSERVED:], key, scale=0.25)
    for row, ratio in enumerate([0.3, 0.65, 0.65]):
        expected = choose_tokens(scores, tokens_to_keep(TOKENS, ratio, RULE), RULE)
        assert torch.equal(kept[row].nonzero()[:, 1].view(2, -1), expected.long())


def test_the_page_tells_where_the_question_stood() -> None:
    """Of tasks that the sums count: the model solves few of the others with all keys."""
    right: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    for line in (RESULTS / "hysparse-quality-compact.jsonl").read_text().splitlines():
        for record in json.loads(line).get("records", ()):
            if record["measure"] == "task" and record["task"] not in ("words", "recite"):
                right[record["aware"]].update({row[0]: row[3] for row in record["results"]})
    rows = json.loads((RESULTS / "hysparse-quality-compact.json").read_text())["rows"]
    sums = {row["name"]: row for row in rows if row["measure"] == "summary" and row["tokens"]}
    for name, title in TITLES.items():
        own = sums[name]
        assert name == "dense" or own["ratio"] == RATIO
        assert own["right"] == right[True][name] + right[False][name], name
        change, error = (100 * own[f"perplexity_change{end}"] for end in ("", "_se"))
        told = "" if name == "dense" else f"{change:+.2f} % ({error:.2f})"
        cells = [title, told, str(right[True][name]), str(right[False][name])]
        assert re.sub(" +", " ", f"| {' | '.join(cells)} |") in PAGE, name
    readme = (ROOT / "README.md").read_text()
    assert f"{right[False]['compact served']} of {right[False]['dense']} where it comes" in readme


def test_the_page_and_the_readme_tell_what_the_engine_answered() -> None:
    lines = (RESULTS / "hysparse-tune-compact" / "tune.jsonl").read_text().splitlines()
    dense, compact = (json.loads(line) for line in lines)
    assert compact["config"]["mode"] == "compact"
    assert compact["config"]["sparsity_ratio"] == RATIO
    answers = [round(24 * each["tasks"]) for each in (dense, compact)]
    assert answers[0] == answers[1]
    assert f"**{answers[1]} of 24 answers right, as dense" in PAGE
    assert f"{answers[1]} of 24 answers at {RATIO}" in (ROOT / "README.md").read_text()
    perplexity = f"{compact['perplexity']:.2f} for dense's {dense['perplexity']:.2f}"
    assert f"perplexity {perplexity}" in PAGE
