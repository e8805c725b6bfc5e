"""What a shadow step measures, beside float64 arithmetic over plain keys."""

from __future__ import annotations

import random

import pytest
import torch

from bicl.attention.cpu import CpuBackend
from bicl.attention.metadata import AttentionMetadata
from bicl.attention.pool import KVPool
from bicl.cache.layout import PageLayout
from bicl.sparse.config import HySparseConfig
from bicl.sparse.shadow import ShadowBackend, make_shadow_backend

HEADS, GROUP, DIM, PAGES = 2, 3, 64, 24
CONFIG = HySparseConfig(sparsity_ratio=0.5, floor_tokens=0)
SCALE = DIM**-0.5


class Case:
    """Two sequences of 20 and 7 pages in two layers, the second of which is sparse."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(2)
        pool = KVPool([PageLayout(HEADS, DIM, torch.float32, swizzle=False)] * 2, 2 * PAGES, "cpu")
        self.backend: ShadowBackend = make_shadow_backend(
            CpuBackend(), CONFIG, pool.layers, [1], torch.float32
        )
        self.layers = pool.layers
        self.lengths = [20 * 64 - 5, 7 * 64]
        order = torch.randperm(2 * PAGES, generator=generator)
        self.table = torch.stack((order[:PAGES], order[PAGES:])).int()
        self.keys = [torch.randn(n, HEADS, DIM, generator=generator) * 2 for n in self.lengths]
        self.query = torch.randn(2, HEADS * GROUP, DIM, generator=generator)
        for row, keys in enumerate(self.keys):
            token = torch.arange(len(keys))
            slots = self.table[row, token // 64].long() * 64 + token % 64
            for layer in self.layers:
                self.backend.store(layer, keys, keys, slots)

    def meta(self) -> AttentionMetadata:
        return AttentionMetadata(
            page_table=self.table,
            cache_seqlens=torch.tensor(self.lengths, dtype=torch.int32),
            cu_seqlens_q=torch.arange(3, dtype=torch.int32),
            slot_mapping=torch.full((2,), -1),
            max_q=1,
            max_k=max(self.lengths),
            sparsity=torch.tensor([0.5, 0.0]),
        )

    def shares(self, row: int, softcap: float = 0.0) -> torch.Tensor:
        """Attention of each query head, float64 ``[Hq, n]``."""
        keys = self.keys[row].double().repeat_interleave(GROUP, dim=1)
        scores = torch.einsum("hd,nhd->hn", self.query[row].double(), keys) * SCALE
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        return scores.softmax(dim=-1)


@pytest.fixture(scope="module")
def case() -> Case:
    return Case()


@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_entropy_and_mass_are_those_of_the_attention(case: Case, softcap: float) -> None:
    meta = case.meta()
    case.backend.arm([0, 1])
    for layer in case.layers:
        case.backend.run(case.query, layer, meta, scale=SCALE, softcap=softcap)
    probes = case.backend.disarm()
    for row in range(2):
        share = case.shares(row, softcap)
        expected = -share.square().sum(dim=-1).log().mean()
        for probe in probes.values():
            assert float(probe.entropy[row]) == pytest.approx(float(expected), abs=1e-4)
    assert probes[0].mass_kept is None
    mass, read = probes[1].mass_kept, probes[1].tiles_read
    assert mass is not None
    assert read is not None
    assert read.tolist() == [10, 7]
    assert float(mass[1]) == pytest.approx(1.0, abs=1e-6)
    index = case.backend.sparse.indexes[1]
    chosen = case.backend.sparse.select(case.query, index, meta, SCALE)
    tiles = case.shares(0, softcap)
    kept = []
    for head in range(HEADS * GROUP):
        pages = set(chosen.page_table[0, head // GROUP, :10].tolist())
        places = [i for i, page in enumerate(case.table[0, :20].tolist()) if page in pages]
        kept.append(sum(float(tiles[head, p * 64 : p * 64 + 64].sum()) for p in places))
    assert float(mass[0]) == pytest.approx(sum(kept) / len(kept), abs=1e-4)


def test_unarmed_it_only_passes_on(case: Case) -> None:
    meta = case.meta()
    out = case.backend.run(case.query, case.layers[1], meta, scale=SCALE)
    plain = case.backend.sparse.run(case.query, case.layers[1], meta, scale=SCALE)
    assert torch.equal(out, plain)
    assert case.backend.disarm() == {}


def test_wrong_index_rows_are_told_and_mended(case: Case) -> None:
    vectors = case.backend.sparse.indexes[1].vectors
    right = vectors.clone()
    pages = case.table[0, :19].long()
    vectors[pages[3]] = 7
    vectors[pages[8], 5] += 1
    assert torch.nonzero(case.backend.reindex(pages, 1)).flatten().tolist() == [3, 8]
    assert torch.equal(vectors[pages], right[pages])
    assert not case.backend.reindex(pages, 1).any()


def test_an_audit_tells_whose_index_rows_are_wrong_and_mends_them(case: Case) -> None:
    vectors = case.backend.sparse.indexes[1].vectors
    right = vectors.clone()
    tables = [case.table[0, :19].tolist(), case.table[1, :7].tolist()]
    assert case.backend.audit(tables, random.Random(1)) == [0, 0]
    vectors[tables[0][3]] = 7
    assert case.backend.audit(tables, random.Random(1)) == [1, 0]
    assert torch.equal(vectors, right)
    assert case.backend.audit([[], []], random.Random(1)) == [0, 0]


@pytest.mark.parametrize("layers", [1, 19])
def test_an_audit_sees_every_sparse_layer_and_row(
    monkeypatch: pytest.MonkeyPatch, layers: int
) -> None:
    """Beyond its budget it takes one page of each."""
    pool = KVPool([PageLayout(HEADS, DIM, torch.float32, swizzle=False)] * layers, 64, "cpu")
    backend = make_shadow_backend(CpuBackend(), CONFIG, pool.layers, range(layers), torch.float32)
    seen: list[tuple[int, list[int]]] = []

    def reindex(pages: torch.Tensor, layer: int) -> torch.Tensor:
        seen.append((layer, pages.tolist()))
        return torch.zeros(len(pages), dtype=torch.bool)

    monkeypatch.setattr(backend, "reindex", reindex)
    tables = [list(range(4 * row, 4 * row + 4)) for row in range(16)]
    assert backend.audit(tables, random.Random(1)) == [0] * 16
    assert [layer for layer, _ in seen] == list(range(layers))
    each = 1 if layers == 19 else 4
    for _, pages in seen:
        assert [sum(page // 4 == row for page in pages) for row in range(16)] == [each] * 16
    assert len({tuple(pages) for _, pages in seen}) == layers, "the same pages in every layer"
