"""SparseBackend on the CPU: it reads what was selected, and is dense where it should be."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.cases import FP8_DTYPES, PAGES_AND_TILES, Step, build_step
from support.compare import LSE_TOLERANCE

from bicl.attention import reference
from bicl.attention.cpu import CpuBackend
from bicl.attention.metadata import AttentionMetadata
from bicl.attention.pool import LayerCache
from bicl.cache.layout import PageLayout
from bicl.errors import BackendError, InvalidInputError
from bicl.ops.cpu.sparse import centroid_rows
from bicl.sparse.backend import SparseBackend
from bicl.sparse.config import HySparseConfig
from bicl.sparse.index import index_bytes, make_indexes, unpack_centroids
from bicl.sparse.sgm import make_gate

SCALE = 0.125


def sparse_backend(layer: LayerCache, kind: str = "bounds", **config: Any) -> SparseBackend:
    indexes = make_indexes({0: layer}, kind, torch.float32)
    settings = {"variant": kind, "floor_tokens": 0} | config
    return SparseBackend(CpuBackend(), HySparseConfig(**settings), indexes)


def filled(step: Step, backend: SparseBackend) -> None:
    """Store all tokens in two calls that cut a page in two."""
    for part in (slice(0, 100), slice(100, None)):
        backend.store(step.layer, step.key[part], step.value[part], step.slots[part])


def decode_step(lengths: tuple[int, ...], layout: PageLayout | None = None, **options: Any) -> Step:
    layout = layout or PageLayout(2, 64, torch.float32, swizzle=False)
    return build_step([(1, n) for n in lengths], layout, filled=False, **options)


def with_sparsity(step: Step, *ratios: float) -> AttentionMetadata:
    return replace(step.meta, sparsity=torch.tensor(ratios))


@pytest.mark.parametrize("kind", ["centroids", "bounds", "gate"])
@pytest.mark.parametrize(("page_size", "tile"), PAGES_AND_TILES)
def test_sparse_decode_is_attention_over_the_selected_pages(
    kind: str, page_size: int, tile: int
) -> None:
    """Positions are untouched, the last page is partial. (A56)"""
    layout = PageLayout(2, 64, torch.float32, page_size=page_size, tile=tile)
    step = decode_step((1000, 333, 5, 0), layout, group=3)
    backend = sparse_backend(step.layer, kind)
    filled(step, backend)
    meta = with_sparsity(step, 0.65, 0.5, 0.5, 0.5)
    out, lse = backend.run(step.query, step.layer, meta, scale=SCALE, return_lse=True)
    chosen = backend.select(step.query, backend.indexes[0], meta, SCALE)
    per_window = 64 // page_size
    assert chosen.page_table.dim() == 3
    tiles = -(-1000 // page_size)
    kept = max(3 * per_window, tiles - math.floor(tiles * 0.65 + 1 / 64))
    assert chosen.cache_seqlens.tolist()[0] == 1000 - (tiles - kept) * page_size
    truth, truth_lse = reference.run(step.query, step.layer, chosen, scale=SCALE)
    torch.testing.assert_close(out, truth, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(lse, truth_lse, atol=LSE_TOLERANCE, rtol=0)
    dense, dense_lse = reference.run(step.query, step.layer, step.meta, scale=SCALE)
    assert (lse[:, :2] < dense_lse[:, :2]).all()
    assert not torch.allclose(out[0], dense[0], atol=1e-3)


def test_only_the_first_and_last_tokens_of_a_long_sequence_keep_their_places() -> None:
    """1,024 first and 7,168 last of 9,000, whose end is no end of a page. (A56)"""
    tokens, first, recent = 9000, 16, 112
    step = decode_step((tokens,), group=2)
    backend = sparse_backend(step.layer, "centroids", first=first, recent=recent, max_k=129)
    filled(step, backend)
    meta = with_sparsity(step, 0.95)
    chosen = backend.select(step.query, backend.indexes[0], meta, SCALE)
    pages = -(-tokens // 64)
    kept = [*range(first), *range(pages - recent, pages)]
    assert (
        chosen.page_table[0, :, : len(kept)].tolist()
        == [step.meta.page_table[0, kept].tolist()] * 2
    )
    near = torch.cat((torch.arange(first * 64), torch.arange((pages - recent) * 64, tokens)))
    assert int(chosen.cache_seqlens[0]) == len(near)
    out = backend.run(step.query, step.layer, meta, scale=SCALE)
    query = step.query[0].view(2, 2, 64).double()
    key, value = (x[near].double() for x in (step.key, step.value))
    share = torch.einsum("hgd,thd->hgt", query, key).mul(SCALE).softmax(dim=-1)
    truth = torch.einsum("hgt,thd->hgd", share, value).reshape(1, 4, 64).float()
    torch.testing.assert_close(out, truth, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("length", [1, 20, 63, 64, 65, 1023, 1024])
def test_sequences_up_to_the_floor_are_dense_bit_for_bit(length: int) -> None:
    """(A57)"""
    step = decode_step((length, 700), group=2)
    backend = sparse_backend(step.layer, floor_tokens=1024)
    filled(step, backend)
    sparse = backend.run(step.query, step.layer, with_sparsity(step, 0.65, 0.9), scale=SCALE)
    dense = CpuBackend().run(step.query, step.layer, step.meta, scale=SCALE)
    assert torch.equal(sparse, dense)


def test_a_layer_leaves_out_its_share() -> None:
    step = decode_step((64 * 40,))
    backend = sparse_backend(step.layer, "centroids")
    filled(step, backend)
    meta, index = with_sparsity(step, 0.5), backend.indexes[0]
    lengths = [
        int(backend.select(step.query, replace(index, share=share), meta, SCALE).cache_seqlens[0])
        for share in (1.0, 1.5, 0.5)
    ]
    assert lengths == [64 * 20, 64 * 10, 64 * 30]


def test_a_row_of_sparsity_zero_is_dense_beside_sparse_rows() -> None:
    step = decode_step((1500, 1500), group=2)
    backend = sparse_backend(step.layer)
    filled(step, backend)
    out = backend.run(step.query, step.layer, with_sparsity(step, 0.9, 0.0), scale=SCALE)
    dense = CpuBackend().run(step.query, step.layer, step.meta, scale=SCALE)
    torch.testing.assert_close(out[1], dense[1], atol=1e-6, rtol=1e-5)
    assert not torch.allclose(out[0], dense[0], atol=1e-3)


@pytest.mark.parametrize("step_kind", ["no sparsity", "several queries", "window", "other layer"])
def test_other_steps_pass_through_unchanged(step_kind: str) -> None:
    layout = PageLayout(2, 64, torch.float32, swizzle=False)
    queries = 3 if step_kind == "several queries" else 1
    step = build_step([(queries, 900)], layout, filled=False)
    backend = sparse_backend(step.layer)
    filled(step, backend)
    meta = step.meta if step_kind == "no sparsity" else with_sparsity(step, 0.9)
    window = 100 if step_kind == "window" else -1
    layer = step.layer
    if step_kind == "other layer":
        layer = LayerCache(step.layer.pages.clone(), layout)
    out = backend.run(step.query, layer, meta, scale=SCALE, window_left=window)
    dense = CpuBackend().run(step.query, layer, step.meta, scale=SCALE, window_left=window)
    assert torch.equal(out, dense)


def test_the_best_page_is_found_and_the_first_and_recent_ones_stay() -> None:
    """A key that the query loves lies in page 7 of head 1 only. (A55)"""
    step = decode_step((64 * 20 + 9,))
    backend = sparse_backend(step.layer, sparsity_ratio=0.8)
    step.key[64 * 7 + 11, 1] = 20 * step.query[0, 1]
    filled(step, backend)
    meta = with_sparsity(step, 0.8)
    chosen = backend.select(step.query, backend.indexes[0], meta, SCALE)
    table = step.meta.page_table[0]
    for head in range(2):
        pages = chosen.page_table[0, head, :5].tolist()
        assert pages[0] == table[0]
        assert pages[-2:] == table[19:21].tolist()
    assert table[7] in chosen.page_table[0, 1, :5].tolist()


@pytest.mark.parametrize("combine", ["softmax", "max"])
@pytest.mark.parametrize(("kind", "tiles"), [("bounds", 60), ("centroids", 60), ("centroids", 512)])
def test_every_query_head_of_a_group_of_eight_gets_its_page(
    kind: str, tiles: int, combine: str
) -> None:
    """Eight needles on eight pages, one for each query head of a KV head; up to 32k. (A60)"""
    layout = PageLayout(1, 64, torch.float32, swizzle=False)
    step = decode_step((64 * tiles,), layout, group=8)
    backend = sparse_backend(step.layer, kind, combine=combine)
    pages = torch.arange(8) * (tiles // 9) + 3
    for head, page in enumerate(pages.tolist()):
        step.key[64 * page + 30, 0] = 40 * step.query[0, head] / step.query[0, head].norm()
    filled(step, backend)
    chosen = backend.select(step.query, backend.indexes[0], with_sparsity(step, 0.8), SCALE)
    count = tiles - int(tiles * 0.8 + 1 / 64)
    assert int(chosen.cache_seqlens[0]) == 64 * count
    kept = chosen.page_table[0, 0, :count].tolist()
    assert set(step.meta.page_table[0, pages].tolist()) <= set(kept)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, *FP8_DTYPES], ids=str)
def test_the_index_describes_the_keys_as_stored(dtype: torch.dtype) -> None:
    layout = PageLayout(3, 80, dtype, swizzle=True)
    step = decode_step((64 * 3 + 1,), layout, k_scale=0.5 if dtype.itemsize == 1 else 1.0)
    backend = sparse_backend(step.layer)
    filled(step, backend)
    keys, _ = reference.gather(step.layer, step.meta.page_table, step.meta.cache_seqlens)
    pages = step.meta.page_table[0, :3].long()
    own = keys[: 64 * 3].view(3, 64, 3, 80)
    vectors = backend.indexes[0].vectors[pages]
    assert torch.equal(vectors[:, :, 0], own.amin(1))
    assert torch.equal(vectors[:, :, 1], own.amax(1))
    others = torch.ones(step.layer.num_pages, dtype=torch.bool)
    others[pages] = False
    assert not backend.indexes[0].vectors[others].any(), "an unfinished page was indexed"


@pytest.mark.parametrize(("page_size", "tile"), PAGES_AND_TILES)
def test_centroids_are_of_the_keys_as_stored(page_size: int, tile: int) -> None:
    layout = PageLayout(3, 80, torch.bfloat16, page_size, tile)
    step = decode_step((page_size * 3 + 1,), layout)
    backend = sparse_backend(step.layer, "centroids")
    filled(step, backend)
    keys, _ = reference.gather(step.layer, step.meta.page_table, step.meta.cache_seqlens)
    pages = step.meta.page_table[0, :3].long()
    own = keys[: page_size * 3].view(3, page_size, 3, 80).transpose(1, 2)
    records = backend.indexes[0].vectors
    rows = 3 * (page_size // 8)
    assert records.shape[1] == -(-rows * (48 + 6) // 16) * 16
    expected = centroid_rows(own, page_size // 8)
    found = unpack_centroids(records[pages], layout)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert not records[pages, rows * 54 :].any()


@pytest.mark.parametrize("kind", ["centroids", "bounds"])
def test_a_page_written_again_is_indexed_again(kind: str) -> None:
    step = decode_step((128,))
    backend = sparse_backend(step.layer, kind)
    filled(step, backend)
    page = int(step.meta.page_table[0, 0])

    def described() -> torch.Tensor:
        record = backend.indexes[0].vectors[page].clone()
        if kind == "bounds":
            return record.float()
        return unpack_centroids(record, step.layer.layout)[..., :64]

    before = described()
    backend.store(step.layer, step.key[:64] * 2, step.value[:64], step.slots[:64])
    torch.testing.assert_close(described(), 2 * before, rtol=2**-9, atol=2**-9)  # float16's


@pytest.mark.parametrize("kind", ["centroids", "bounds", "gate"])
def test_copied_pages_take_their_index_along(kind: str) -> None:
    step = decode_step((128,))
    backend = sparse_backend(step.layer, kind)
    filled(step, backend)
    source = step.meta.page_table[0, :2].long()
    target = torch.tensor([p for p in range(5) if p not in source.tolist()][:2])
    backend.copy_pages([step.layer], source, target)
    vectors = backend.indexes[0].vectors
    assert (vectors[target] == vectors[source]).all()


def test_gate_indexes_are_directions_of_the_gated_keys() -> None:
    step = decode_step((64,))
    backend = sparse_backend(step.layer, "gate")
    filled(step, backend)
    vectors = backend.indexes[0].vectors[int(step.meta.page_table[0, 0])]
    assert vectors.shape == (2, 1, 128)
    gate = make_gate("gate", (0,), 64)
    expected = gate.project(step.key, "key").mean(0)[:, None]
    torch.testing.assert_close(vectors, expected.detach())


@pytest.mark.parametrize("kind", ["centroids", "bounds", "gate"])
def test_index_bytes_are_those_of_the_index(kind: str) -> None:
    layout = PageLayout(2, 80, torch.bfloat16)
    step = decode_step((64,), layout)
    index = make_indexes({4: step.layer}, kind, torch.bfloat16)[4]
    assert index.bytes_per_page == index_bytes(layout, kind, torch.bfloat16)


class Overlapping(CpuBackend):
    """Stores and attends as the CUDA backend is told to, and notes how."""

    pdl = True

    def __init__(self) -> None:
        super().__init__()
        self.told: list[bool] = []
        self.known: list[bool] = []

    def store(self, *rows: Any, records: Any = None, choice_follows: bool = False, **rest: Any):
        self.told.append(choice_follows)
        super().store(*rows, **rest)

    def run(self, *given: Any, lengths_known: bool = False, **options: Any) -> Any:
        self.known.append(lengths_known)
        return super().run(*given, **options)


def test_lengths_are_known_from_the_second_layer_of_a_planned_step_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of layers that leave out the same share; the first one's are read in all."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    step = decode_step((1000, 333))
    inner = Overlapping()
    indexes = make_indexes({0: step.layer}, "bounds", torch.float32)
    backend = SparseBackend(inner, HySparseConfig(variant="bounds", floor_tokens=0), indexes)
    filled(step, backend)
    other = replace(indexes[0], share=0.5)
    meta, plain = with_sparsity(step, 0.65, 0.65), step.meta

    def layers(*shares: Any, of: AttentionMetadata = meta) -> list[bool]:
        inner.known.clear()
        for index in shares:
            backend._by_pages[step.layer.pages.data_ptr()] = index
            out = backend.run(step.query, step.layer, of, scale=SCALE)
            alone = sparse_backend(step.layer, floor_tokens=0)
            alone._by_pages[step.layer.pages.data_ptr()] = index
            assert torch.equal(out, alone.run(step.query, step.layer, of, scale=SCALE))  # type: ignore[arg-type]
        return list(inner.known)

    first = indexes[0]
    assert layers(first, first) == [False, False]  # nothing planned
    backend.plan(meta)
    assert layers(first, other, first, other, first) == [False, False, True, True, True]
    assert layers(first, of=replace(meta, page_table=meta.page_table.clone())) == [True]
    assert layers(first, of=replace(meta, sparsity=meta.sparsity / 2)) == [False]  # another step
    backend.plan(meta)
    assert layers(first, first) == [False, True]
    backend.plan(plain)
    assert layers(first, first, of=plain) == [False, False]


def test_a_store_is_told_of_a_choice_only_where_one_follows() -> None:
    """What follows otherwise reads what the kernel ahead of the store may still be writing."""
    step = decode_step((1000, 333))
    inner = Overlapping()
    indexes = make_indexes({0: step.layer}, "bounds", torch.float32)
    backend = SparseBackend(inner, HySparseConfig(variant="bounds"), indexes)
    meta = with_sparsity(step, 0.65, 0.65)
    kept = torch.zeros(2, meta.page_table.shape[1], dtype=torch.bool)
    chunk = build_step([(7, 70)], step.layer.layout, filled=False).meta
    row = (step.key[:1], step.value[:1], step.slots[:1])
    backend.store(step.layer, *row)  # nothing planned
    for planned in (meta, step.meta, replace(meta, keep=kept), meta, chunk):
        backend.plan(planned)
        backend.store(step.layer, *row)
    assert inner.told == [False, True, False, False, True, False]


def test_a_backend_without_operators_is_refused() -> None:
    class Other(CpuBackend):
        name = "tpu"

    with pytest.raises(BackendError, match="no operators for backend 'tpu'"):
        SparseBackend(Other(), HySparseConfig(), {})


def test_lists_for_the_wrong_number_of_heads_are_refused() -> None:
    step = decode_step((128,))
    meta = replace(step.meta, page_table=step.meta.page_table[:, None].expand(-1, 3, -1))
    with pytest.raises(InvalidInputError, match="lists for 3 heads"):
        CpuBackend().run(step.query, step.layer, meta, scale=SCALE)


def test_lists_a_head_are_refused_in_prefill() -> None:
    layout = PageLayout(2, 64, torch.float32, swizzle=False)
    step = build_step([(3, 128)], layout)
    meta = replace(step.meta, page_table=step.meta.page_table[:, None].expand(-1, 2, -1))
    with pytest.raises(InvalidInputError, match="decode steps"):
        CpuBackend().run(step.query, step.layer, meta, scale=SCALE)
