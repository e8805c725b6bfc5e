"""HySparse and what a prompt's text is: its kind, and its syntax."""

from __future__ import annotations

from dataclasses import replace

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


def spied(engine, monkeypatch) -> list:
    """What each sparse layer of each step chose from and chose."""
    backend, seen = engine._runner.shadow.sparse, []
    select = backend.select

    def spy(query, index, meta, scale):
        chosen = select(query, index, meta, scale)
        seen.append((meta, chosen))
        return chosen

    monkeypatch.setattr(backend, "select", spy)
    return seen


@pytest.mark.parametrize("page_size", [64, 32])
def test_a_kind_of_text_always_reads_its_newest_windows(tiny, monkeypatch, page_size) -> None:
    """Row by row: code beside prose in one step. As many tiles are read as without."""
    config = settings(kind_rules="code=0.85:5", recent=1)
    options = {**SIZES, "guard": BOUNDS, "page_size": page_size}
    engine = stepped(tiny, **options, hysparse=config)
    seen = spied(engine, monkeypatch)
    streams = [engine.submit(request(encode(tiny, text), 6)) for text in (CODE, PROSE)]
    run_steps(engine)
    told = [collect(stream).done.usage.sparse for stream in streams]
    assert [each.text_kind for each in told] == ["code", "other"]
    both = [(meta, chosen) for meta, chosen in seen if len(meta.cache_seqlens) == 2]
    assert both
    newest, chosen_by_score = 5 * 64 // page_size, 0
    for meta, chosen in both:
        lengths = -(-meta.cache_seqlens // page_size)
        for row, tiles in enumerate(lengths.tolist()):
            table = meta.page_table[row].tolist()
            kept = -(-int(chosen.cache_seqlens[row]) // page_size)
            for head in chosen.page_table[row]:
                places = [table.index(page) for page in head[:kept].tolist()]
                if row == 0:
                    assert places[-newest:] == list(range(tiles - newest, tiles))
                else:
                    chosen_by_score += places[-newest:] != list(range(tiles - newest, tiles))
    assert chosen_by_score
    plain = stepped(tiny, **options, hysparse=replace(config, kind_rules=""))
    stream = plain.submit(request(encode(tiny, CODE), 6))
    run_steps(plain)
    assert collect(stream).done.usage.sparse.tiles_read == told[0].tiles_read


def test_windows_that_do_not_fit_are_kept_as_far_as_they_do(tiny, monkeypatch) -> None:
    engine = stepped(tiny, **SIZES, hysparse=settings(kind_rules="code=1:400"), guard=BOUNDS)
    seen = spied(engine, monkeypatch)
    stream = engine.submit(request(encode(tiny, CODE), 3))
    run_steps(engine)
    assert collect(stream).done.usage.sparse.actual_ratio == pytest.approx(0.6, abs=0.08)
    for meta, chosen in seen:
        table = meta.page_table[0].tolist()
        tiles, kept = (-(-int(each.cache_seqlens[0]) // 64) for each in (meta, chosen))
        for head in chosen.page_table[0]:
            places = [table.index(page) for page in head[:kept].tolist()]
            assert places == [0, *range(tiles - kept + 1, tiles)]


def test_a_request_that_names_its_ratio_gets_no_kinds_windows(tiny, monkeypatch) -> None:
    engine = stepped(tiny, **SIZES, hysparse=settings(kind_rules="code=1:5"), guard=BOUNDS)
    seen = spied(engine, monkeypatch)
    engine.submit(request(encode(tiny, CODE), 3, sparse=SparseOptions(sparsity_ratio=0.6)))
    run_steps(engine)
    assert seen
    assert all(meta.keep is None for meta, _ in seen)


def test_compact_layers_keep_a_kinds_newest_windows(tiny) -> None:
    kept = {}
    for rules in ("", "code=0.85:5"):
        config = settings(mode="compact", recent=1, kind_rules=rules)
        engine = stepped(tiny, **SIZES, hysparse=config, guard=BOUNDS)
        drop, positions = engine._runner.compact.drop, []

        def spy(pages, verdicts, target, drop=drop, positions=positions):
            positions += [head.tolist() for each in verdicts.values() for head in each.positions]
            drop(pages, verdicts, target)

        engine._runner.compact.drop = spy
        engine.submit(request(encode(tiny, CODE[:900]), 3))
        run_steps(engine)
        kept[rules] = positions
    whole = list(range(900 - (4 * 64 + 900 % 64), 900))
    assert all(head[-len(whole) :] == whole for head in kept["code=0.85:5"])
    assert not all(head[-len(whole) :] == whole for head in kept[""])
    assert {len(head) for head in kept[""]} == {len(head) for head in kept["code=0.85:5"]}


def test_pages_of_definitions_are_read_in_every_sparse_step(tiny, monkeypatch) -> None:
    engine = stepped(tiny, **SIZES, hysparse=CONFIG, guard=BOUNDS)
    seen = spied(engine, monkeypatch)
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
