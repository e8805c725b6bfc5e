"""Decode over chosen pages, other pages for each KV head."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from support.cases import PAGES_AND_TILES
from support.compare import assert_close_enough, assert_lse_close
from support.device import truth_of
from support.sparse import (
    STORED,
    UNSET,
    Indexed,
    choose,
    everyone,
    indexed_step,
    rule_for,
    truth_of_choice,
)

from bicl.attention.cuda import CudaBackend
from bicl.cache.layout import PageLayout
from bicl.sparse.backend import SparseBackend
from bicl.sparse.config import HySparseConfig
from bicl.sparse.selection import SelectionRule

pytestmark = pytest.mark.gpu


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
    truth = truth_of_choice(own, read, positions)
    for head in range(3):
        heads = slice(head * group, (head + 1) * group)
        assert_close_enough(out[:, heads], truth.out[:, heads], truth.same_precision[:, heads])
    assert_lse_close(lse, truth.lse)


@pytest.mark.parametrize(
    "lengths", [[70_001], [20_001, 4161, 8385], [(997 * i) % 9000 for i in range(32)]], ids=str
)
@pytest.mark.parametrize("page_size", [32, 64])
def test_long_and_uneven_sequences_read_what_was_chosen(
    backend: CudaBackend, lengths: list[int], page_size: int
) -> None:
    """Chosen by many CTAs, read by clusters or in shares that CTAs cut; some rows whole."""
    layout = PageLayout(2, 128, torch.bfloat16, page_size, page_size)
    own = indexed_step(backend, lengths, layout)
    sparsity = everyone(own.meta, 0.65)
    sparsity[1::5] = 0.0
    pages, read, positions = choose(own, sparsity, rule_for(page_size))
    chosen = replace(own.meta, page_table=pages, cache_seqlens=read)
    out, lse = backend.run(own.step.query, own.step.layer, chosen, scale=own.scale, return_lse=True)
    truth = truth_of_choice(own, read, positions)
    assert_close_enough(out, truth.out, truth.same_precision)
    assert_lse_close(lse, truth.lse)


@pytest.mark.parametrize("page_and_tile", PAGES_AND_TILES)
def test_only_the_first_and_last_tokens_of_a_long_sequence_keep_their_places(
    backend: CudaBackend, page_and_tile: tuple[int, int]
) -> None:
    """1,024 first and 7,168 last of 9,000, whose end is no end of a page. (A56)"""
    layout = PageLayout(2, 128, torch.bfloat16, *page_and_tile)
    tokens, size = 9000, layout.page_size
    first, recent, count = 1024 // size, 7168 // size, -(-tokens // size)
    own = indexed_step(backend, [tokens], layout)
    rule = SelectionRule(
        page_size=size, max_k=first + recent, first=first, recent=recent, floor=first + recent
    )
    pages, read, positions = choose(own, everyone(own.meta, 0.95), rule)
    kept = torch.tensor([*range(first), *range(count - recent, count)], device="cuda")
    assert torch.equal(positions[0, :, : len(kept)].long(), kept.expand(2, -1))
    assert torch.equal(pages[0, :, : len(kept)], own.meta.page_table[0, kept].expand(2, -1))
    near = (kept[:, None] * size + torch.arange(size, device="cuda")).reshape(-1)
    near = near[near < tokens]
    assert int(read[0]) == len(near)
    chosen = replace(own.meta, page_table=pages, cache_seqlens=read)
    out, lse = backend.run(own.step.query, own.step.layer, chosen, scale=own.scale, return_lse=True)
    alone = replace(own.step, meta=chosen, key=own.step.key[near], value=own.step.value[near])
    truth = truth_of(alone, scale=own.scale)
    assert_close_enough(out, truth.out, truth.same_precision)
    assert_lse_close(lse, truth.lse)


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


def sparse_backend(backend: CudaBackend, case: Indexed) -> SparseBackend:
    return SparseBackend(backend, HySparseConfig(floor_tokens=256), {0: case.index})


def test_the_sparse_backend_indexes_what_it_stores_and_selects(backend: CudaBackend) -> None:
    own = indexed_step(backend, [6400, 64, 1280], PageLayout(2, 128, torch.bfloat16))
    before = own.index.vectors.clone()
    wrapped = sparse_backend(backend, own)
    key, value = own.step.key[-1280:], own.step.value[-1280:]
    own.index.vectors.fill_(UNSET)
    wrapped.store(own.step.layer, own.step.key, own.step.value, own.step.slots)
    assert torch.equal(own.index.vectors, before)
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


@pytest.mark.parametrize("lengths", [[32768], [9000, 700, 20000], [4096] * 9, [64] * 40], ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_layers_that_know_the_lengths_read_the_pages_chosen_just_before(
    lengths: list[int], deterministic: bool
) -> None:
    """Layer after layer in a graph that is replayed at other lengths than it was captured with."""
    options = {"deterministic": deterministic}
    own = indexed_step(CudaBackend(), lengths, PageLayout(8, 128, torch.bfloat16))
    meta = replace(own.meta, sparsity=everyone(own.meta, 0.65))
    queries = torch.randn(6, *own.step.query.shape, device="cuda").bfloat16()
    slots = torch.full_like(own.step.slots[: len(lengths)], -1)
    rows = own.step.key[: len(lengths)], own.step.value[: len(lengths)]

    def layers(wrapped: SparseBackend) -> list[torch.Tensor]:
        outs = []
        wrapped.plan(meta)
        for query in queries:
            wrapped.store(own.step.layer, *rows, slots)
            out = wrapped.run(query, own.step.layer, meta, scale=own.scale)
            assert isinstance(out, torch.Tensor)
            outs.append(out)
        return outs

    early = sparse_backend(CudaBackend(**options), own)
    layers(early)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = layers(early)
    for cut in (0, 40, 0, 63):
        meta.cache_seqlens.sub_(cut).clamp_(min=0)
        truths = layers(sparse_backend(CudaBackend(pdl=False, **options), own))
        for out in outs:
            out.fill_(math.nan)
        graph.replay()
        assert all(torch.equal(out, truth) for out, truth in zip(outs, truths, strict=True))
        for out, truth in zip(layers(early), truths, strict=True):
            assert torch.equal(out, truth)


@pytest.mark.parametrize("lengths", [[32768], [4096] * 8, [9000, 700, 20000]], ids=str)
def test_a_choice_that_starts_before_the_store_sees_this_steps_query(
    backend: CudaBackend, lengths: list[int]
) -> None:
    """From a graph in which the kernel ahead of the store writes the query."""
    own = indexed_step(backend, lengths, PageLayout(8, 128, torch.bfloat16))
    last = torch.tensor(lengths).cumsum(0) - 1
    slots, rows = own.step.slots[last].clone(), (own.step.key[last], own.step.value[last])
    meta = replace(own.meta, sparsity=everyone(own.meta, 0.65), slot_mapping=slots)
    queries = torch.randn(4, *own.step.query.shape, device="cuda").bfloat16()
    query = torch.zeros_like(own.step.query)

    def steps(wrapped: SparseBackend) -> list[torch.Tensor]:
        outs = []
        for other in queries:
            query.copy_(other)
            wrapped.plan(meta)
            wrapped.store(own.step.layer, *rows, slots)
            out = wrapped.run(query, own.step.layer, meta, scale=own.scale)
            assert isinstance(out, torch.Tensor)
            outs.append(out)
        return outs

    truths = steps(sparse_backend(CudaBackend(pdl=False), own))
    early = sparse_backend(backend, own)
    steps(early)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = steps(early)
    for _ in range(20):
        for out in outs:
            out.zero_()
        graph.replay()
        assert all(torch.equal(out, truth) for out, truth in zip(outs, truths, strict=True))


@pytest.mark.parametrize("lengths", [[32_768 + 2], [9026, 704, 20_002], [4160] * 24], ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("page_size", [32, 64])
def test_steps_behind_their_stores_see_the_newest_tokens_and_index(
    lengths: list[int], deterministic: bool, page_size: int
) -> None:
    """A graph of steps that each store a token and complete pages on the way; between replays
    the tokens, and the index of their pages, are NaN."""
    steps = 4
    layout = PageLayout(8, 128, torch.bfloat16, page_size, page_size)
    own = indexed_step(CudaBackend(), lengths, layout)
    last = torch.tensor(lengths, device="cuda").cumsum(0) - 1
    sparsity = everyone(own.meta, 0.65)
    places = [last - steps + 1 + i for i in range(steps)]
    metas = [
        replace(
            own.meta,
            cache_seqlens=own.meta.cache_seqlens - steps + 1 + i,
            slot_mapping=own.step.slots[places[i]].clone(),
            sparsity=sparsity,
        )
        for i in range(steps)
    ]
    rows = [(own.step.key[at].clone(), own.step.value[at].clone()) for at in places]
    queries = torch.randn(steps, *own.step.query.shape, device="cuda").bfloat16()
    query = torch.zeros_like(own.step.query)
    newest = torch.cat([meta.slot_mapping for meta in metas])
    poison = torch.full((len(newest), 8, 128), math.nan, device="cuda").bfloat16()
    backends = {pdl: CudaBackend(deterministic=deterministic, pdl=pdl) for pdl in (False, True)}

    def keeping_little(backend: CudaBackend) -> SparseBackend:
        """The page that the last step but one completed competes with the old ones."""
        return SparseBackend(backend, HySparseConfig(floor_tokens=256, recent=1), {0: own.index})

    def forget() -> None:
        backends[False].store(own.step.layer, poison, poison, newest)
        own.index.vectors[newest // page_size] = UNSET

    def chain(wrapped: SparseBackend) -> list[torch.Tensor]:
        outs = []
        for i, meta in enumerate(metas):
            query.copy_(queries[i])
            wrapped.plan(meta)
            wrapped.store(own.step.layer, *rows[i], meta.slot_mapping)
            out = wrapped.run(query, own.step.layer, meta, scale=own.scale)
            assert isinstance(out, torch.Tensor)
            outs.append(out)
        return outs

    forget()
    truths = chain(keeping_little(backends[False]))
    assert all(bool(truth.isfinite().all()) for truth in truths)
    early = keeping_little(backends[True])
    chain(early)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = chain(early)
    for _ in range(20):
        forget()
        for out in outs:
            out.fill_(math.nan)
        graph.replay()
        assert all(torch.equal(out, truth) for out, truth in zip(outs, truths, strict=True))
