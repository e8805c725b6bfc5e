"""Choosing pages on the GPU against the CPU operators."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.cases import PAGES_AND_TILES, pairwise
from support.sparse import LENGTHS, STORED, choose, everyone, indexed_step, num_tiles, rule_for

from bicl.attention.cuda import CudaBackend
from bicl.cache.layout import PageLayout
from bicl.ops.cpu import sparse as twin
from bicl.ops.cuda import sparse
from bicl.sparse.selection import SelectionRule

pytestmark = pytest.mark.gpu

WAYS = ("split", "by rule", 1, 2, 4, 8)  # two launches, or CTAs a cluster
CASES = list(
    pairwise(
        stored=list(STORED),
        head_dim=(64, 80, 96, 128, 256),
        lengths=list(LENGTHS),
        group=(1, 3, 4, 8, 12, 20),
        page_and_tile=PAGES_AND_TILES,
        kv_heads=(1, 3, 8),
        combine=("max", "sum", "softmax"),
        sparsity=(0.3, 0.65, 0.9),
        way=WAYS,
        recent=(1, 2, 5),
    )
)


def assert_best_chosen(
    shares: torch.Tensor,
    positions: torch.Tensor,
    kept: int,
    tiles: int,
    rule: SelectionRule,
    combine: str,
) -> None:
    """``positions`` of one head hold ``kept`` of ``tiles``, ascending, none worse than one left
    out by more than rounding the weighted query to 16 bits explains."""
    chosen = positions[:kept].long()
    assert bool((positions[kept:] == -7).all())
    assert bool((chosen[1:] > chosen[:-1]).all())
    taken = torch.zeros(tiles, dtype=torch.bool, device="cuda")
    taken[chosen] = True
    assert bool(taken[: rule.first].all())
    assert bool(taken[max(0, tiles - rule.recent) :].all())
    candidates = slice(rule.first, max(rule.first, tiles - rule.recent))
    inside, share = taken[candidates], shares[:tiles][candidates]
    if bool(inside.any()) and not bool(inside.all()):
        worst, best = share[inside].min(), share[~inside].max()
        # An error of a score is a relative one of its softmax.
        assert worst >= best - (0.05 * best if combine == "softmax" else 5e-3 * share.abs().max())


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c.values())))
def test_the_best_tiles_are_chosen(backend: CudaBackend, case: dict[str, object]) -> None:
    """(A55, A59)"""
    dtype, stored = STORED[case["stored"]]  # type: ignore[index]
    page_size, tile = case["page_and_tile"]  # type: ignore[misc]
    kv_heads = int(case["kv_heads"])  # type: ignore[call-overload]
    layout = PageLayout(kv_heads, case["head_dim"], stored, page_size, tile)  # type: ignore[arg-type]
    lengths = LENGTHS[case["lengths"]]  # type: ignore[index]
    own = indexed_step(backend, lengths, layout, group=case["group"], dtype=dtype)  # type: ignore[arg-type]
    rule = rule_for(page_size, recent=case["recent"])  # type: ignore[arg-type]
    sparsity = everyone(own.meta, case["sparsity"])  # type: ignore[arg-type]
    sparsity[::5] = 0.0
    own = replace(own, index=replace(own.index, share=0.9))
    combine = str(case["combine"])
    pages, lengths_out, positions = choose(own, sparsity, rule, combine, case["way"])

    tiles = num_tiles(own.meta, page_size)
    kept = rule.tiles_to_keep(tiles, sparsity if case["way"] == "split" else sparsity * 0.9)
    assert torch.equal(lengths_out, own.meta.cache_seqlens - (tiles - kept) * page_size)
    scores = twin.score_tiles(
        own.step.query,
        own.step.layer,
        own.index,
        own.meta.page_table,
        own.meta.cache_seqlens,
        own.scale,
    )
    place = torch.arange(scores.shape[2], device="cuda")
    counted = place < tiles[:, None] - rule.recent
    shares = twin.combine_heads(scores, counted, kv_heads, combine)
    for row in range(own.meta.batch_size):
        n = int(kept[row])
        for head in range(kv_heads):
            own_shares, own_positions = shares[row, head], positions[row, head]
            assert_best_chosen(own_shares, own_positions, n, int(tiles[row]), rule, combine)
        read = own.meta.page_table[row][positions[row, :, :n].long()]
        assert torch.equal(pages[row, :, :n], read)


@pytest.mark.parametrize("stored", ["bf16", "bf16 on e4m3"])
@pytest.mark.parametrize("way", WAYS)
def test_every_query_head_of_a_group_of_eight_finds_its_needle_in_32k(
    backend: CudaBackend, way: object, stored: str
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
    _, lengths, positions = choose(own, everyone(own.meta, 0.8), rule_for(64), "softmax", way)
    assert int(lengths[0]) == 64 * 103
    assert set(pages.tolist()) <= set(positions[0, 1, :103].tolist())


@pytest.mark.parametrize("way", WAYS)
def test_of_equal_scores_the_earlier_tiles_win(backend: CudaBackend, way: object) -> None:
    own = indexed_step(backend, [64 * 300, 64 * 77], PageLayout(2, 128, torch.bfloat16, 64, 64))
    own.index.vectors.fill_(0x11)  # steps of 1, some number of keys
    sparsity = everyone(own.meta, 0.65)
    rule = rule_for(64)
    _, _, positions = choose(own, sparsity, rule, "sum", way)
    kept = rule.tiles_to_keep(num_tiles(own.meta, 64), sparsity).tolist()
    for row, tiles in enumerate((300, 77)):
        wanted = [*range(kept[row] - 2), tiles - 2, tiles - 1]
        for head in range(2):
            assert positions[row, head, : kept[row]].tolist() == wanted


@pytest.mark.parametrize("poison", [0xFF, 0x7B, 0], ids=["NaN", "most", "empty"])
@pytest.mark.parametrize("combine", ["max", "sum", "softmax"])
def test_a_broken_index_still_gives_a_valid_choice(
    backend: CudaBackend, poison: int, combine: str
) -> None:
    own = indexed_step(backend, [5000, 3333], PageLayout(2, 64, torch.bfloat16, 64, 64))
    own.index.vectors[::3] = poison
    sparsity, rule = everyone(own.meta, 0.65), rule_for(64)
    _, _, positions = choose(own, sparsity, rule, combine)
    tiles = num_tiles(own.meta, 64)
    kept = rule.tiles_to_keep(tiles, sparsity)
    for row in range(2):
        for head in range(2):
            chosen = positions[row, head, : int(kept[row])]
            assert bool((chosen[1:] > chosen[:-1]).all())
            assert chosen[0] == 0
            assert chosen[-2:].tolist() == [int(tiles[row]) - 2, int(tiles[row]) - 1]


def test_a_captured_choice_is_right_for_other_lengths(backend: CudaBackend) -> None:
    """The graph holds the step of a layer: index, choice, decode."""
    own = indexed_step(backend, [6400, 4000, 129, 2048], PageLayout(2, 128, torch.bfloat16))
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
    for tokens in ([6400, 4000, 129, 2048], [0, 4000, 64, 1000], [3, 1, 129, 2047]):
        own.meta.cache_seqlens.copy_(torch.tensor(tokens, dtype=torch.int32))
        sparsity[2] = 0.0
        graph.replay()
        replayed = out.clone(), lengths.clone()
        eager = layer_step()
        assert torch.equal(replayed[0], eager[0])
        assert torch.equal(replayed[1], eager[1])


def test_a_deterministic_choice_does_not_depend_on_the_batch(backend: CudaBackend) -> None:
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
            deterministic=True,
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
    if "dtype" in change:
        own = replace(own, step=replace(own.step, query=own.step.query.float()))
    with pytest.raises(ValueError, match=message):
        choose(own, sparsity.cuda(), rule)
