"""A step of decode rows and prefill rows: every part is what it would be alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bicl.attention.cpu import CpuBackend
from bicl.attention.metadata import AttentionMetadata
from bicl.attention.pool import KVPool
from bicl.cache.layout import PageLayout
from bicl.sparse.backend import SparseBackend
from bicl.sparse.config import HySparseConfig
from bicl.sparse.index import make_indexes
from bicl.sparse.mixed import divide

HEADS, GROUP, DIM, WIDTH = 2, 2, 64, 12
LENGTHS, QUERIES = [700, 500, 300, 650], [1, 1, 40, 5]
SCALE = DIM**-0.5
CONFIG = HySparseConfig(sparsity_ratio=0.5, floor_tokens=0)


class Case:
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(4)
        layout = PageLayout(HEADS, DIM, torch.float32, swizzle=False)
        pool = KVPool([layout], len(LENGTHS) * WIDTH, "cpu")
        self.layer = pool.layers[0]
        self.inner = CpuBackend()
        self.backend = SparseBackend(
            self.inner, CONFIG, make_indexes({0: self.layer}, "bounds", torch.float32)
        )
        order = torch.randperm(len(LENGTHS) * WIDTH, generator=generator)
        self.table = order.view(len(LENGTHS), WIDTH).int()
        for row, length in enumerate(LENGTHS):
            token = torch.arange(length)
            slots = self.table[row, token // 64].long() * 64 + token % 64
            rows = torch.randn(length, HEADS, DIM, generator=generator)
            self.backend.store(self.layer, rows, rows, slots)
        self.query = torch.randn(sum(QUERIES), HEADS * GROUP, DIM, generator=generator)
        starts = torch.tensor([0, *torch.tensor(QUERIES).cumsum(0).tolist()], dtype=torch.int32)
        self.meta = AttentionMetadata(
            page_table=self.table,
            cache_seqlens=torch.tensor(LENGTHS, dtype=torch.int32),
            cu_seqlens_q=starts,
            slot_mapping=torch.full((sum(QUERIES),), -1),
            max_q=max(QUERIES),
            max_k=max(LENGTHS),
            sparsity=torch.tensor([0.5, 0.0, 0.5, 0.5]),
            num_decodes=2,
        )

    def run(self, query: torch.Tensor, meta: AttentionMetadata, **options):
        return self.backend.run(query, self.layer, meta, scale=SCALE, **options)


@pytest.fixture(scope="module")
def case() -> Case:
    return Case()


def test_a_step_is_divided_where_its_decode_rows_end(case: Case) -> None:
    step = divide(case.meta)
    assert step.decodes.cu_seqlens_q.tolist() == [0, 1, 2]
    assert step.rest.cu_seqlens_q.tolist() == [0, 40, 45]
    assert step.decodes.max_q == 1
    assert len(step.decodes.slot_mapping) == 2
    assert len(step.rest.slot_mapping) == 45
    assert step.rest.sparsity is None


def test_decode_rows_are_sparse_and_the_others_dense(case: Case) -> None:
    out, lse = case.run(case.query, case.meta, return_lse=True)
    dense, dense_lse = case.run(case.query, replace(case.meta, sparsity=None), return_lse=True)
    decodes = divide(case.meta).decodes
    alone, alone_lse = case.run(case.query[:2], decodes, return_lse=True)
    assert torch.equal(out[:2], alone)
    assert torch.equal(lse[:, :2], alone_lse)
    assert not torch.allclose(out[0], dense[0])  # half of its tiles
    torch.testing.assert_close(out[1:], dense[1:])
    torch.testing.assert_close(lse[:, 1:], dense_lse[:, 1:])


def test_the_result_goes_where_it_is_wanted(case: Case) -> None:
    out = torch.empty_like(case.query)
    found = case.run(case.query, case.meta, out=out)
    assert found is out
    assert torch.equal(out, case.run(case.query, case.meta))


def test_without_decode_rows_or_with_a_window_all_is_dense(case: Case) -> None:
    dense = case.run(case.query, replace(case.meta, sparsity=None))
    assert torch.equal(case.run(case.query, replace(case.meta, num_decodes=0)), dense)
    window = case.run(case.query, case.meta, window_left=100)
    expected = case.run(case.query, replace(case.meta, sparsity=None), window_left=100)
    assert torch.equal(window, expected)
