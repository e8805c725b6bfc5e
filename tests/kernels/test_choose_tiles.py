"""Choosing pages on the GPU against the CPU operators."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.cases import PAGES_AND_TILES, pairwise
from support.sparse import (
    LENGTHS,
    STORED,
    Indexed,
    assert_best_listed,
    assert_follows_rule,
    choose,
    everyone,
    indexed_step,
    num_tiles,
    rule_for,
)
from torch.nn import functional as F

from bicl.attention.cuda import CudaBackend
from bicl.cache.layout import PageLayout
from bicl.ops.cpu import sparse as twin
from bicl.ops.cpu.select_tiles import select_tiles, stratum_shares
from bicl.ops.cuda import sparse
from bicl.sparse.selection import SelectionRule

pytestmark = pytest.mark.gpu

ABSURD = 2**31 - 1
"""A page id where none belongs."""

CASES = list(
    pairwise(
        stored=list(STORED),
        head_dim=(64, 80, 96, 128, 256),
        lengths=[*LENGTHS, "long"],
        group=(1, 3, 4, 8, 12, 16, 20),
        page_and_tile=PAGES_AND_TILES,
        kv_heads=(1, 3, 8),
        combine=("max", "sum", "softmax"),
        sparsity=(0.3, 0.65, 0.9),
        first=(1, 2, 9),
        recent=(1, 2, 5),
        after_store=(False, True),
        unused=(0, 1, 1000),
    )
)
LONG = [110_003, 4161, 70_000, 8321]


def wider(own: Indexed, columns: int) -> Indexed:
    """With a table of more columns, as the step of a longer sequence has it."""
    table = F.pad(own.meta.page_table, (0, columns), value=ABSURD)
    return replace(own, step=replace(own.step, meta=replace(own.meta, page_table=table)))


def assert_best_chosen(
    own: Indexed, positions: torch.Tensor, kept: torch.Tensor, rule: SelectionRule, combine: str
) -> None:
    """None worse than one left out, or listed behind it, by more than rounding the weighted query
    to 16 bits explains."""
    meta, layer = own.meta, own.step.layer
    tiles = num_tiles(meta, rule.page_size)
    assert_follows_rule(positions, tiles, kept, rule)
    scores = twin.score_tiles(
        own.step.query, layer, own.index, meta.page_table, meta.cache_seqlens, own.scale
    )
    dealt = rule.strata(tiles, kept, meta.page_table.shape[1])
    shares = stratum_shares(scores, dealt, rule.first, layer.layout.num_kv_heads, combine)
    # An error of a score is a relative one of its softmax.
    there = shares.masked_fill(shares.isinf(), 0.0).abs().amax(dim=(2, 3), keepdim=True)
    relative, absolute = (0.05, 0.0) if combine == "softmax" else (0.0, 5e-3)
    assert_best_listed(positions, shares, dealt, kept < tiles, relative, absolute * there)


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c.values())))
def test_the_best_tiles_are_chosen(backend: CudaBackend, case: dict[str, object]) -> None:
    """(A55, A59)"""
    dtype, stored = STORED[case["stored"]]  # type: ignore[index]
    page_size, tile = case["page_and_tile"]  # type: ignore[misc]
    kv_heads = int(case["kv_heads"])  # type: ignore[call-overload]
    layout = PageLayout(kv_heads, case["head_dim"], stored, page_size, tile)  # type: ignore[arg-type]
    lengths = LONG if case["lengths"] == "long" else LENGTHS[case["lengths"]]  # type: ignore[index]
    own = indexed_step(backend, lengths, layout, group=case["group"], dtype=dtype)  # type: ignore[arg-type]
    own = wider(own, int(case["unused"]))  # type: ignore[call-overload]
    rule = rule_for(page_size, first=case["first"], recent=case["recent"])  # type: ignore[arg-type]
    sparsity = everyone(own.meta, case["sparsity"])  # type: ignore[arg-type]
    sparsity[::5] = 0.0
    own = replace(own, index=replace(own.index, share=0.9))
    combine, after_store = str(case["combine"]), bool(case["after_store"])
    pages, lengths_out, positions = choose(own, sparsity, rule, combine, after_store=after_store)

    tiles = num_tiles(own.meta, page_size)
    kept = rule.tiles_to_keep(tiles, sparsity * 0.9)
    assert torch.equal(lengths_out, own.meta.cache_seqlens - (tiles - kept) * page_size)
    assert_best_chosen(own, positions, kept, rule, combine)
    listed = torch.arange(positions.shape[2], device="cuda") < kept[:, None, None]
    table = own.meta.page_table[:, None].expand(-1, kv_heads, -1)
    read = table.gather(2, torch.where(listed, positions, 0).long())
    assert torch.equal(torch.where(listed, pages, -1), torch.where(listed, read, -1))


@pytest.mark.parametrize("page_size", [32, 64])
@pytest.mark.parametrize("sparsity", [0.05, 0.65, 0.95])
def test_one_page_more_or_less_than_whole_strata(
    backend: CudaBackend, page_size: int, sparsity: float
) -> None:
    rule = rule_for(page_size)
    ends, stratum = rule.first + rule.recent, rule.stratum
    tiles = [n * stratum + ends + more for n in (1, 2, 3, 5) for more in (-1, 0, 1, n)]
    lengths = [count * page_size - (count % 3) for count in tiles]
    layout = PageLayout(2, 128, torch.bfloat16, page_size)
    own = indexed_step(backend, lengths, layout)
    _, _, positions = choose(own, everyone(own.meta, sparsity), rule)
    kept = rule.tiles_to_keep(num_tiles(own.meta, page_size), everyone(own.meta, sparsity))
    assert_best_chosen(own, positions, kept, rule, "softmax")


@pytest.mark.parametrize("page_size", [32, 64])
def test_strata_that_ctas_take_in_turns(backend: CudaBackend, page_size: int) -> None:
    """More of them than a card runs CTAs at once, beside rows of few and of none."""
    rule = rule_for(page_size)
    lengths = [30_000, 17, 12_345, 4096] + [9000 + 11 * i for i in range(12)] + [700] * 24
    own = indexed_step(backend, lengths, PageLayout(8, 64, torch.bfloat16, page_size))
    for after_store in (False, True):
        given = choose(own, everyone(own.meta, 0.65), rule, after_store=after_store)
        kept = rule.tiles_to_keep(num_tiles(own.meta, page_size), everyone(own.meta, 0.65))
        assert_best_chosen(own, given[2], kept, rule, "softmax")


@pytest.mark.parametrize("stored", ["bf16", "bf16 on e4m3"])
def test_every_query_head_of_a_group_of_eight_finds_its_needle_in_32k(
    backend: CudaBackend, stored: str
) -> None:
    """Eight needles on eight pages, one for each query head of a KV head. (A60)"""
    dtype, kept_as = STORED[stored]
    own = indexed_step(backend, [32768], PageLayout(2, 128, kept_as), group=8, dtype=dtype)
    pages = torch.arange(8) * 60 + 5
    step = own.step
    for head, page in enumerate(pages.tolist()):
        loved = step.query[0, 8 + head]
        step.key[64 * page + 30, 1] = 60 * loved / loved.norm()
    backend.store(step.layer, step.key, step.value, step.slots)
    sparse.index_pages(step.layer, own.index, step.slots)
    own = replace(own, index=replace(own.index, weights=torch.ones(1, 128, device="cuda")))
    _, lengths, positions = choose(own, everyone(own.meta, 0.8), rule_for(64), "softmax")
    assert int(lengths[0]) == 64 * 103
    assert set(pages.tolist()) <= set(positions[0, 1, :103].tolist())


@pytest.mark.parametrize("combine", ["max", "sum", "softmax"])
@pytest.mark.parametrize("page_size", [32, 64])
def test_of_equal_scores_the_earlier_tiles_win(
    backend: CudaBackend, page_size: int, combine: str
) -> None:
    layout = PageLayout(2, 128, torch.bfloat16, page_size)
    own = indexed_step(backend, [page_size * 300, page_size * 77, page_size * 1000 - 3], layout)
    own.index.vectors.fill_(0x11)  # steps of 1, some number of keys
    sparsity, rule = everyone(own.meta, 0.65), rule_for(page_size)
    _, lengths, positions = choose(own, sparsity, rule, combine)
    table = own.meta.page_table
    wanted = torch.full_like(positions, -7)
    scores = torch.zeros(3, 8, table.shape[1], device="cuda")
    place = (table, own.meta.cache_seqlens, sparsity)
    assert torch.equal(lengths, select_tiles(scores, *place, rule, 2, combine, wanted)[1])
    listed = wanted < table.shape[1]
    assert torch.equal(positions, torch.where(listed, wanted, -7))


@pytest.mark.parametrize("poison", [0xFF, 0x7B, 0], ids=["NaN", "most", "empty"])
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("combine", ["max", "sum", "softmax"])
def test_a_broken_index_still_gives_a_valid_choice(
    backend: CudaBackend, poison: int, every: int, combine: str
) -> None:
    own = indexed_step(backend, [5000, 3333, 20000], PageLayout(2, 64, torch.bfloat16, 64, 64))
    own.index.vectors[::every] = poison
    sparsity, rule = everyone(own.meta, 0.65), rule_for(64)
    _, _, positions = choose(own, sparsity, rule, combine)
    tiles = num_tiles(own.meta, 64)
    assert_follows_rule(positions, tiles, rule.tiles_to_keep(tiles, sparsity), rule)


def test_a_captured_choice_is_right_for_other_lengths(backend: CudaBackend) -> None:
    """The graph holds the step of a layer: index, choice, decode."""
    longest = [20_000, 4000, 129, 9000]
    own = indexed_step(backend, longest, PageLayout(2, 128, torch.bfloat16))
    sparsity, rule = everyone(own.meta, 0.65), rule_for(64)
    query, layer = own.step.query, own.step.layer

    def layer_step() -> tuple[torch.Tensor, torch.Tensor]:
        sparse.index_pages(layer, own.index, own.meta.slot_mapping)
        pages, lengths, _ = choose(own, sparsity, rule, after_store=True)
        chosen = replace(own.meta, page_table=pages, cache_seqlens=lengths)
        out = backend.run(query, layer, chosen, scale=own.scale)
        assert isinstance(out, torch.Tensor)
        return out, lengths

    layer_step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lengths = layer_step()
    others = ([0, 4000, 64, 1000], [3, 1, 129, 8999], [8512, 3999, 100, 4352])
    for tokens in (longest, *others, longest):
        own.meta.cache_seqlens.copy_(torch.tensor(tokens, dtype=torch.int32))
        sparsity[2], sparsity[3] = 0.0, 0.65 - sparsity[3]
        graph.replay()
        replayed = out.clone(), lengths.clone()
        eager = layer_step()
        assert torch.equal(replayed[0], eager[0])
        assert torch.equal(replayed[1], eager[1])


def test_a_choice_does_not_depend_on_the_batch(backend: CudaBackend) -> None:
    """Scores a rounding error apart change places where sums are taken in another order."""
    own = indexed_step(backend, [64 * 200] * 8, PageLayout(4, 64, torch.bfloat16))
    own = replace(own, index=replace(own.index, weights=own.index.weights * 1e-3))  # near ties
    sparsity, rule = everyone(own.meta, 0.65), rule_for(64)

    def chosen(rows: slice) -> torch.Tensor:
        meta = own.meta
        positions = torch.zeros(
            (len(range(8)[rows]), 4, meta.page_table.shape[1]), dtype=torch.int32, device="cuda"
        )
        sparse.choose_tiles(
            own.step.query[rows],
            own.step.layer,
            own.index,
            meta.page_table[rows],
            meta.cache_seqlens[rows],
            sparsity[rows],
            rule,
            "softmax",
            scale=own.scale,
            positions=positions,
        )
        return positions

    together = chosen(slice(None))
    for row in range(8):
        assert torch.equal(chosen(slice(row, row + 1))[0], together[row])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sparsity": torch.zeros(9)}, "sparsity"),
        ({"max_k": 2}, "max_k is 2; the first and recent pages alone are 3"),
        ({"stratum": 32}, "stratum is 32 pages of 64; 64 compete with each other here"),
        ({"dtype": torch.float32}, "query must be float16 or bfloat16"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    backend: CudaBackend, change: dict[str, object], message: str
) -> None:
    own = indexed_step(backend, [700, 900], PageLayout(2, 64, torch.bfloat16))
    sparsity = change.get("sparsity", torch.zeros(2))
    assert isinstance(sparsity, torch.Tensor)
    rule = rule_for(64, max_k=int(change.get("max_k", 512)))  # type: ignore[call-overload]
    if "stratum" in change:
        rule = replace(rule, stratum=change["stratum"])
    if "dtype" in change:
        own = replace(own, step=replace(own.step, query=own.step.query.float()))
    with pytest.raises(ValueError, match=message):
        choose(own, sparsity.cuda(), rule)
