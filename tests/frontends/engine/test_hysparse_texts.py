"""HySparse and what a prompt's text is: its kind, and its syntax."""

from __future__ import annotations

import pytest
import torch
from support.driving import collect, generate, request, run_steps, running, stepped

from bicl.errors import ConfigError, InvalidInputError
from bicl.frontends.http.engine.compact import REVIEW_TOKENS
from bicl.frontends.http.request import SparseOptions
from bicl.sparse import syntax
from bicl.sparse.config import HySparseConfig
from bicl.sparse.guard import GuardBounds
from bicl.sparse.syntax import boundaries

CODE = "".join(f"def step{n}(a, b):\n    c = a * b + {n}\n    return c\n\n" for n in range(20))
PROSE = "The lighthouse stood on a rock, and the sea went round it all day. " * 14
CONFIG = HySparseConfig(layers="0-2/3", floor_tokens=128, sparsity_ratio=0.6)
BOUNDS = GuardBounds(min_mass_kept=0.0)
SIZES = {"max_total_tokens": 1024, "max_batch_size": 2, "max_batch_prefill_tokens": 1024}
AWARE = SparseOptions(enable_sg=True)


def encode(tiny, text: str) -> list[int]:
    """One token a byte."""
    return tiny.tokenizer(text).input_ids


def settings(**changes) -> HySparseConfig:
    return HySparseConfig(**{**vars(CONFIG), **changes})


@pytest.mark.parametrize(
    ("kind", "text", "told", "ratio"),
    [
        ("auto", CODE, "code", 0.51),
        ("auto", PROSE, "other", 0.6),
        ("off", CODE, "", 0.6),
        ("legal", PROSE, "legal", 0.51),
    ],
)
def test_the_kind_of_text_lowers_the_servers_ratio(tiny, kind, text, told, ratio) -> None:
    with running(tiny, **SIZES, hysparse=settings(text_kind=kind), guard=BOUNDS) as engine:
        wish = SparseOptions(sparsity_ratio=0.6)
        ids = encode(tiny, text)
        own, wished = generate(engine, request(ids, 4), request(ids, 4, sparse=wish))
    usage = own.done.usage.sparse
    assert usage.text_kind == told
    assert usage.sparsity_ratio == pytest.approx(ratio)
    assert usage.actual_ratio == pytest.approx(ratio, abs=0.08)
    assert wished.done.usage.sparse.sparsity_ratio == 0.6  # a request's own wish holds as it is


def test_pages_of_definitions_are_read_in_every_sparse_step(tiny, monkeypatch) -> None:
    engine = stepped(tiny, **SIZES, hysparse=CONFIG, guard=BOUNDS)
    backend, seen = engine._runner.shadow.sparse, []
    select = backend.select

    def spy(query, index, meta, scale):
        chosen = select(query, index, meta, scale)
        seen.append((meta, chosen))
        return chosen

    monkeypatch.setattr(backend, "select", spy)
    stream = engine.submit(request(encode(tiny, CODE), 6, sparse=AWARE))
    run_steps(engine)
    told = collect(stream).done.usage.sparse
    assert told.text_kind == "code"
    assert told.actual_ratio > 0.4
    wanted = list(dict.fromkeys(place // 64 for place in boundaries(CODE, code=True)))
    assert seen
    for meta, chosen in seen:
        kept = -(-int(chosen.cache_seqlens[0]) // 64)
        forced = wanted[: (kept - 3) // 2]
        assert forced
        assert meta.keep[0].nonzero().flatten().tolist() == sorted(forced)
        table = meta.page_table[0].tolist()
        for head in chosen.page_table[0]:
            assert {table[place] for place in forced} <= set(head[:kept].tolist())


def test_tokens_of_definitions_stay_through_every_compaction(tiny) -> None:
    config = settings(mode="compact", recent=1)
    engine = stepped(tiny, **SIZES, hysparse=config, guard=BOUNDS)
    backend, drops = engine._runner.compact, []
    drop = backend.drop

    def spy(pages, verdicts, target):
        drops.append(verdicts)
        drop(pages, verdicts, target)

    backend.drop = spy
    text = CODE[:600]
    engine.submit(request(encode(tiny, text), REVIEW_TOKENS + 60, sparse=AWARE))
    run_steps(engine)
    assert len(drops) == 2
    first, second = drops
    starts = boundaries(text, code=True)
    kept = len(first[0].positions[0])
    forced = starts[: (kept - 2 * 64) // 2]
    assert forced
    for layer in first:
        for head in range(2):
            before = first[layer].positions[head].tolist()
            after = second[layer].positions[head].tolist()
            assert set(forced) <= set(before)
            assert {before.index(token) for token in forced} <= set(after)


def test_it_is_refused_where_the_parser_is_missing(tiny, monkeypatch) -> None:
    monkeypatch.setattr(syntax, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="tree-sitter"):
        stepped(tiny, **SIZES, hysparse=settings(enable_sg=True))
    engine = stepped(tiny, **SIZES, hysparse=CONFIG)
    with pytest.raises(InvalidInputError, match="tree-sitter"):
        engine.submit(request(encode(tiny, CODE), 4, sparse=AWARE))
    engine.submit(request(encode(tiny, CODE[:100]), 1, sparse=AWARE))  # nothing to leave out


def test_prose_without_structure_is_served_as_ever(tiny) -> None:
    with running(tiny, **SIZES, hysparse=CONFIG, guard=BOUNDS) as engine:
        ids = encode(tiny, PROSE)
        plain, aware = generate(engine, request(ids, 8), request(ids, 8, sparse=AWARE))
    assert plain.ids == aware.ids
    assert torch.tensor(aware.ids).numel() == 8
