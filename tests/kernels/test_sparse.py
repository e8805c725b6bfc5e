"""Choosing pages on the GPU against the CPU operators, and decode over what was chosen.

Index rows that nobody computed are NaN, and table entries that nobody uses absurd.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from support.cases import FP8_DTYPES, PAGES_AND_TILES, Step, pairwise
from support.compare import assert_close_enough, assert_lse_close
from support.device import as_stored, decode_step, decode_truth

from bicl.attention.cuda import CudaBackend
from bicl.attention.metadata import AttentionMetadata
from bicl.attention.pool import LayerCache
from bicl.cache.layout import PageLayout
from bicl.ops.cpu import sparse as twin
from bicl.ops.cpu.compact_tokens import compact_tokens as compact_on_cpu
from bicl.ops.cuda import sparse
from bicl.ops.cuda.compact_tokens import compact_tokens
from bicl.sparse.backend import SparseBackend
from bicl.sparse.config import HySparseConfig
from bicl.sparse.index import LayerIndex
from bicl.sparse.selection import SelectionRule

pytestmark = pytest.mark.gpu

LENGTHS = {
    "edges": [0, 1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 257, 700],
    "alike": [4096] * 3,
    "one": [20001],
    "skewed": [20000, 1, 64, 700, 0, 333, 2049],
    "many": [(371 * i) % 3000 for i in range(60)],
}
STORED = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "bf16 on e4m3": (torch.bfloat16, FP8_DTYPES[0]),
    "fp16 on e5m2": (torch.float16, FP8_DTYPES[1]),
}
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


@dataclass(frozen=True)
class Indexed:
    step: Step
    index: LayerIndex
    scale: float

    @property
    def meta(self) -> AttentionMetadata:
        return self.step.meta


def indexed_step(
    backend: CudaBackend,
    lengths: list[int],
    layout: PageLayout,
    *,
    group: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    k_scale: float = 1.0,
) -> Indexed:
    step = decode_step(
        backend, lengths, layout, group=group, dtype=dtype, seed=seed, k_scale=k_scale
    )
    shape = (step.layer.num_pages, layout.num_kv_heads, 2, layout.head_dim)
    vectors = torch.full(shape, math.nan, dtype=dtype, device="cuda")
    weights = torch.rand(2, layout.head_dim, device="cuda") + 0.25
    index = LayerIndex(step.layer, vectors, "bounds", weights)
    sparse.index_pages(step.layer, index, step.slots)
    return Indexed(step, index, layout.head_dim**-0.5)


def choose(
    case: Indexed,
    sparsity: torch.Tensor,
    rule: SelectionRule,
    combine: str = "softmax",
    way: object = "by rule",
    *,
    after_store: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pages, lengths and positions; unused entries of the last are -7."""
    query, layer, meta = case.step.query, case.step.layer, case.meta
    heads = layer.layout.num_kv_heads
    shape = (meta.batch_size, heads, meta.page_table.shape[1])
    positions = torch.full(shape, -7, dtype=torch.int32, device="cuda")
    place = (meta.page_table, meta.cache_seqlens)
    if way == "split":
        scores = sparse.score_tiles(query, layer, case.index, *place, case.scale)
        pages, lengths = sparse.select_tiles(
            scores, *place, sparsity, rule, heads, combine, positions
        )
    else:
        pages, lengths = sparse.choose_tiles(
            query,
            layer,
            case.index,
            *place,
            sparsity,
            rule,
            combine,
            scale=case.scale,
            positions=positions,
            after_store=after_store,
            force_cluster=way if isinstance(way, int) else 0,
        )
    return pages, lengths, positions


def rule_for(page_size: int, *, recent: int = 2, floor: int = 4, max_k: int = 512) -> SelectionRule:
    return SelectionRule(page_size=page_size, max_k=max_k, first=1, recent=recent, floor=floor)


def everyone(meta: AttentionMetadata, share: float) -> torch.Tensor:
    return torch.full((meta.batch_size,), share, device="cuda")


def num_tiles(meta: AttentionMetadata, page_size: int) -> torch.Tensor:
    return (meta.cache_seqlens + page_size - 1) // page_size


def assert_best_chosen(
    shares: torch.Tensor,
    positions: torch.Tensor,
    kept: int,
    tiles: int,
    rule: SelectionRule,
    combine: str,
) -> None:
    """``positions`` of one head hold ``kept`` of ``tiles``, ascending, none worse than one left
    out by more than rounding the coefficients to 16 bits explains."""
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
    combine = str(case["combine"])
    pages, lengths_out, positions = choose(own, sparsity, rule, combine, case["way"])

    tiles = num_tiles(own.meta, page_size)
    kept = rule.tiles_to_keep(tiles, sparsity)
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
    candidate = (place >= rule.first) & (place < tiles[:, None] - rule.recent)
    shares = twin.combine_heads(scores, candidate, kv_heads, combine)
    for row in range(own.meta.batch_size):
        n = int(kept[row])
        for head in range(kv_heads):
            own_shares, own_positions = shares[row, head], positions[row, head]
            assert_best_chosen(own_shares, own_positions, n, int(tiles[row]), rule, combine)
        read = own.meta.page_table[row][positions[row, :, :n].long()]
        assert torch.equal(pages[row, :, :n], read)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("page_and_tile", PAGES_AND_TILES)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_index_rows_are_the_bounds_of_full_pages(
    backend: CudaBackend, stored: str, page_and_tile: tuple[int, int], head_dim: int
) -> None:
    dtype, kept_as = STORED[stored]
    layout = PageLayout(3, head_dim, kept_as, *page_and_tile)
    scale = 0.5 if kept_as.itemsize == 1 else 1.0
    own = indexed_step(backend, LENGTHS["edges"], layout, dtype=dtype, k_scale=scale)
    key, size = as_stored(own.step)[0], layout.page_size
    full = {}
    for row, slot in enumerate(own.step.slots.tolist()):
        if slot % size == size - 1:
            full[slot // size] = key[row - size + 1 : row + 1]
    assert full
    vectors = own.index.vectors
    for page, keys in full.items():
        assert torch.equal(vectors[page, :, 0], keys.amin(0).to(dtype))
        assert torch.equal(vectors[page, :, 1], keys.amax(0).to(dtype))
    others = [page for page in range(len(vectors)) if page not in full]
    assert bool(vectors[others].isnan().all()), "a page that is not full was indexed"


def test_slots_that_complete_no_page_or_are_skipped_touch_no_index_row(
    backend: CudaBackend,
) -> None:
    layout = PageLayout(2, 64, torch.bfloat16, 64, 64)
    own = indexed_step(backend, [200], layout)
    own.index.vectors.fill_(math.nan)
    slots = torch.tensor([-1, 0, 62, 64, -64, 126], device="cuda")
    sparse.index_pages(own.step.layer, own.index, slots)
    assert bool(own.index.vectors.isnan().all())


@pytest.mark.parametrize("way", WAYS)
def test_of_equal_scores_the_earlier_tiles_win(backend: CudaBackend, way: object) -> None:
    own = indexed_step(backend, [64 * 300, 64 * 77], PageLayout(2, 128, torch.bfloat16, 64, 64))
    own.index.vectors.fill_(1.0)
    sparsity = everyone(own.meta, 0.65)
    rule = rule_for(64)
    _, _, positions = choose(own, sparsity, rule, "sum", way)
    kept = rule.tiles_to_keep(num_tiles(own.meta, 64), sparsity).tolist()
    for row, tiles in enumerate((300, 77)):
        wanted = [*range(kept[row] - 2), tiles - 2, tiles - 1]
        for head in range(2):
            assert positions[row, head, : kept[row]].tolist() == wanted


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("combine", ["max", "sum", "softmax"])
def test_a_broken_index_still_gives_a_valid_choice(
    backend: CudaBackend, poison: float, combine: str
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


@pytest.mark.parametrize("share", [0.0, 0.65])
def test_rows_that_keep_all_are_bit_identical_to_dense(backend: CudaBackend, share: float) -> None:
    """At ratio 0, and below the floor. (A57)"""
    own = indexed_step(backend, [0, 1, 63, 64, 65, 300, 1024], PageLayout(3, 128, torch.bfloat16))
    rule = rule_for(64, floor=16)
    pages, lengths, _ = choose(own, everyone(own.meta, share), rule)
    assert torch.equal(lengths, own.meta.cache_seqlens)
    chosen = replace(own.meta, page_table=pages, cache_seqlens=lengths)
    query, layer = own.step.query, own.step.layer
    dense = backend.run(query, layer, own.meta, scale=own.scale, return_lse=True)
    sparse_run = backend.run(query, layer, chosen, scale=own.scale, return_lse=True)
    assert torch.equal(dense[0], sparse_run[0])
    assert torch.equal(dense[1], sparse_run[1])


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("page_and_tile", PAGES_AND_TILES)
@pytest.mark.parametrize("group", [1, 4, 12])
def test_decode_reads_each_heads_own_tiles(
    backend: CudaBackend, stored: str, page_and_tile: tuple[int, int], group: int
) -> None:
    """Against float32 over the kept keys alone; positions are not renumbered. (A56)"""
    dtype, kept_as = STORED[stored]
    layout = PageLayout(3, 128, kept_as, *page_and_tile)
    lengths = [3000, 0, 65, 1999, 4097]
    own = indexed_step(backend, lengths, layout, group=group, dtype=dtype)
    rule = rule_for(layout.page_size)
    pages, read, positions = choose(own, everyone(own.meta, 0.65), rule)
    chosen = replace(own.meta, page_table=pages, cache_seqlens=read)
    out, lse = backend.run(own.step.query, own.step.layer, chosen, scale=own.scale, return_lse=True)
    size = layout.page_size
    for head in range(3):
        tokens = []
        start = 0
        for row, length in enumerate(lengths):
            kept = positions[row, head, : -(-int(read[row]) // size)].long()
            token = (kept[:, None] * size + torch.arange(size, device="cuda")).reshape(-1)
            tokens.append(start + token[token < length])
            start += length
        picked = torch.cat(tokens)
        heads = slice(head * group, (head + 1) * group)
        alone = replace(
            own.step,
            layer=LayerCache(own.step.layer.pages, replace(layout, num_kv_heads=1)),
            meta=chosen,
            query=own.step.query[:, heads],
            key=own.step.key[picked, head : head + 1],
            value=own.step.value[picked, head : head + 1],
        )
        truth = decode_truth(alone, scale=own.scale)
        assert_close_enough(out[:, heads], truth.out, truth.same_precision)
        assert_lse_close(lse[heads], truth.lse)


def test_kept_and_rest_merged_by_lse_equal_dense(backend: CudaBackend) -> None:
    own = indexed_step(backend, [64 * 100, 64 * 51], PageLayout(2, 128, torch.bfloat16, 64, 64))
    rule = rule_for(64)
    pages, lengths, positions = choose(own, everyone(own.meta, 0.65), rule)
    rest = torch.zeros_like(pages)
    for row, tiles in enumerate((100, 51)):
        for head in range(2):
            left = torch.ones(tiles, dtype=torch.bool, device="cuda")
            left[positions[row, head, : int(lengths[row]) // 64].long()] = False
            rest[row, head, : int(left.sum())] = own.meta.page_table[row, :tiles][left]
    query, layer = own.step.query, own.step.layer

    def attend(table: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        part = replace(own.meta, page_table=table, cache_seqlens=tokens)
        out, lse = backend.run(query, layer, part, scale=own.scale, return_lse=True)
        return out.float(), lse.t()[..., None]

    dense, dense_lse = attend(own.meta.page_table, own.meta.cache_seqlens)
    out_a, lse_a = attend(pages, lengths)
    out_b, lse_b = attend(rest, own.meta.cache_seqlens - lengths)
    lse = torch.logaddexp(lse_a, lse_b)
    torch.testing.assert_close(lse, dense_lse, atol=1e-3, rtol=1e-4)
    merged = out_a * (lse_a - lse).exp() + out_b * (lse_b - lse).exp()
    torch.testing.assert_close(merged, dense, atol=2e-3, rtol=1e-2)


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
    own.index.vectors.mul_(1e-3)  # near ties
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


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("page_and_tile", PAGES_AND_TILES)
@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_storing_a_step_indexes_the_pages_it_completes(
    backend: CudaBackend, stored: str, page_and_tile: tuple[int, int], head_dim: int
) -> None:
    """In one launch, bit for bit what two give."""
    dtype, kept_as = STORED[stored]
    layout = PageLayout(3, head_dim, kept_as, *page_and_tile)
    lengths = [64, 65, 640, 63, 1, 96, 1024]
    own = indexed_step(backend, lengths, layout, dtype=dtype)
    wanted_pages, wanted_rows = own.step.layer.pages.clone(), own.index.vectors.clone()
    ends = torch.tensor(lengths).cumsum(0) - 1
    slots = own.step.slots[ends].clone()
    slots[1] = -1
    for slot in slots[slots >= 0].tolist():
        page, row = divmod(slot, layout.page_size)
        offsets = torch.from_numpy(layout.plane_offsets[row].copy()).cuda()
        raw = torch.uint8 if kept_as.itemsize == 1 else torch.int16
        own.step.layer.pages[page].view(raw).view(3, 2, -1)[:, :, offsets] = 0
        if row == layout.page_size - 1:
            own.index.vectors[page] = math.nan
    backend.store(
        own.step.layer,
        own.step.key[ends],
        own.step.value[ends],
        slots,
        bounds=own.index.vectors,
    )
    bits = own.step.layer.pages.view(torch.uint8)
    assert torch.equal(bits, wanted_pages.view(torch.uint8))
    assert torch.equal(own.index.vectors.nan_to_num(9.0), wanted_rows.nan_to_num(9.0))


def sparse_backend(backend: CudaBackend, case: Indexed) -> SparseBackend:
    return SparseBackend(backend, HySparseConfig(floor_tokens=256), {0: case.index})


def test_the_sparse_backend_indexes_what_it_stores_and_selects(backend: CudaBackend) -> None:
    own = indexed_step(backend, [6400, 64, 1280], PageLayout(2, 128, torch.bfloat16))
    before = own.index.vectors.clone()
    wrapped = sparse_backend(backend, own)
    key, value = own.step.key[-1280:], own.step.value[-1280:]
    own.index.vectors.fill_(math.nan)
    wrapped.store(own.step.layer, own.step.key, own.step.value, own.step.slots)
    assert torch.equal(own.index.vectors.nan_to_num(9), before.nan_to_num(9))
    meta = replace(own.meta, sparsity=everyone(own.meta, 0.65))
    wrapped.plan(meta)
    wrapped.store(own.step.layer, key[-1:], value[-1:], own.step.slots[-1:])
    out = wrapped.run(own.step.query, own.step.layer, meta, scale=own.scale)
    dense = backend.run(own.step.query, own.step.layer, own.meta, scale=own.scale)
    assert isinstance(out, torch.Tensor)
    assert isinstance(dense, torch.Tensor)
    assert not torch.equal(out[0], dense[0])
    assert torch.equal(out[1], dense[1])
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("page_and_tile", PAGES_AND_TILES)
def test_compacted_tokens_lie_side_by_side(
    backend: CudaBackend, stored: str, page_and_tile: tuple[int, int]
) -> None:
    dtype, kept_as = STORED[stored]
    layout = PageLayout(3, 96, kept_as, *page_and_tile)
    step = decode_step(backend, [1000, 700], layout, dtype=dtype)
    order = [torch.randperm(700)[:333].sort().values for _ in range(3)]
    positions = torch.stack(order).to("cuda", torch.int32)
    size = layout.page_size
    pages = torch.randperm(12)[: -(-333 // size)].to("cuda", torch.int32)
    fresh = torch.zeros(layout.shape(12)).to(kept_as)
    target = LayerCache(fresh.cuda(), layout)
    compact_tokens(step.layer, step.meta.page_table[1], positions, target, pages)
    on_cpu = LayerCache(fresh.clone(), layout)
    compact_on_cpu(
        LayerCache(step.layer.pages.cpu(), layout),
        step.meta.page_table[1].cpu(),
        positions.cpu(),
        on_cpu,
        pages.cpu(),
    )
    moved = target.pages.cpu().view(torch.uint8)
    assert torch.equal(moved, on_cpu.pages.view(torch.uint8))
    key, value = as_stored(step)
    if kept_as.itemsize == 1:
        return
    got = backend.gather(target, pages[None], torch.tensor([333], dtype=torch.int32, device="cuda"))
    for rows, wanted in zip(got, (key, value), strict=True):
        for head in range(3):
            expected = wanted[1000:][positions[head].long(), head]
            assert torch.equal(rows[:, head].float(), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sparsity": torch.zeros(9)}, "sparsity"),
        ({"max_k": 2}, "max_k is 2; the first and recent pages alone are 3"),
        ({"dtype": torch.float16}, "query must have the index's dtype"),
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
        own = replace(own, step=replace(own.step, query=own.step.query.half()))
    with pytest.raises(ValueError, match=message):
        choose(own, sparsity.cuda(), rule)
