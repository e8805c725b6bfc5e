"""Wrong arguments are refused by name, before anything is read or written."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from support.cases import Step, build_step

from bicl.attention.cpu import CpuBackend
from bicl.cache.layout import PageLayout
from bicl.errors import InvalidInputError, UnsupportedError

LAYOUT = PageLayout(2, 64, torch.float32, swizzle=False)


@pytest.fixture
def backend() -> CpuBackend:
    return CpuBackend()


@pytest.fixture
def step() -> Step:
    return build_step([(1, 65), (3, 70)], LAYOUT, group=2)


def test_table_too_narrow_for_a_length_is_refused_on_read(backend: CpuBackend) -> None:
    """Two columns hold 128 tokens, not 129. (A41)"""
    step = build_step([(1, 129)], LAYOUT)
    narrow = replace(step.meta, page_table=step.meta.page_table[:, :2].contiguous())
    with pytest.raises(InvalidInputError, match=r"cache_seqlens\[0\] is 129.*2 columns.*128"):
        backend.run(step.query, step.layer, narrow, scale=1.0)


def test_table_too_narrow_is_refused_before_the_store(backend: CpuBackend) -> None:
    """(A41)"""
    step = build_step([(1, 129)], LAYOUT, filled=False)
    narrow = replace(step.meta, page_table=step.meta.page_table[:, :2].contiguous())
    backend.plan(narrow)
    with pytest.raises(InvalidInputError, match="cache_seqlens"):
        backend.store(step.layer, step.key[-1:], step.value[-1:], narrow.slot_mapping)
    assert step.layer.pages.isnan().all()


@pytest.mark.parametrize("page", [6, 10**9, -1])
def test_page_outside_the_pool_within_a_length_is_refused(
    backend: CpuBackend, step: Step, page: int
) -> None:
    """The pool has 7 pages: two sequences of two, three to spare. (A42)"""
    step.meta.page_table[1, 1] = page if page != 6 else step.layer.num_pages
    with pytest.raises(InvalidInputError, match=r"page_table\[1, 1\] is .*pages 0\.\.6"):
        backend.run(step.query, step.layer, step.meta, scale=1.0)
    with pytest.raises(InvalidInputError, match="page_table"):
        backend.gather(step.layer, step.meta.page_table, step.meta.cache_seqlens)


def test_slot_outside_the_pool_is_refused(backend: CpuBackend, step: Step) -> None:
    slots = torch.tensor([0, step.layer.num_pages * 64])
    before = step.layer.pages.clone()
    with pytest.raises(InvalidInputError, match=r"slot 448 is outside the pool.*0\.\.447"):
        backend.store(step.layer, step.key[:2], step.value[:2], slots)
    assert torch.equal(step.layer.pages, before) or before.isnan().any()
    assert torch.equal(step.layer.pages.isnan(), before.isnan())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_table": torch.zeros(2, 4, dtype=torch.int64)}, "page_table must be int32"),
        ({"page_table": torch.zeros(3, 4, dtype=torch.int32)}, r"page_table.*\[2, any\].*\[3, 4\]"),
        ({"page_table": torch.zeros(8, dtype=torch.int32)}, "page_table must have shape"),
        ({"cache_seqlens": torch.tensor([65, 70])}, "cache_seqlens must be int32"),
        ({"cache_seqlens": torch.tensor([-1, 70], dtype=torch.int32)}, "must not be negative"),
        ({"cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32)}, r"cu_seqlens_q.*\[3\].*\[2\]"),
        ({"cu_seqlens_q": torch.tensor([0, 2, 1], dtype=torch.int32)}, "start at 0 and never fall"),
        ({"cu_seqlens_q": torch.tensor([1, 2, 4], dtype=torch.int32)}, "start at 0 and never fall"),
        ({"slot_mapping": torch.zeros(4, dtype=torch.int32)}, "slot_mapping must be int64"),
        ({"max_q": 2}, "max_q is 2, but the step has 3"),
        ({"max_k": 69}, "max_k is 69, but the step has 70"),
        ({"max_k": -1}, "must not be negative"),
    ],
)
def test_metadata_is_checked_when_planned(
    backend: CpuBackend, step: Step, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        backend.plan(replace(step.meta, **changes))


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (torch.zeros(4, 4, 32), r"query must have shape \[any, any, 64\], got \[4, 4, 32\]"),
        (torch.zeros(4, 3, 64), "query has 3 heads; a positive multiple of the cache's 2"),
        (torch.zeros(4, 0, 64), "query has 0 heads"),
        (torch.zeros(3, 4, 64), "query has 3 rows, but cu_seqlens_q ends at 4"),
        (torch.zeros(4, 4, 64, dtype=torch.float64), "query must be float32 or float16 or bfl"),
        (torch.zeros(4, 64), "query must have shape"),
    ],
)
def test_query_is_checked(
    backend: CpuBackend, step: Step, query: torch.Tensor, message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        backend.run(query, step.layer, step.meta, scale=1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": 0.0}, "scale is 0.0"),
        ({"scale": math.nan}, "scale is nan"),
        ({"scale": 1.0, "softcap": -1.0}, "softcap is -1.0"),
        ({"scale": 1.0, "softcap": math.nan}, "softcap is nan"),
        ({"scale": 1.0, "out": torch.zeros(4, 4, 32)}, "out must have shape"),
        ({"scale": 1.0, "out": torch.zeros(4, 4, 64).half()}, "out must be float32"),
    ],
)
def test_options_are_checked(
    backend: CpuBackend, step: Step, options: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        backend.run(step.query, step.layer, step.meta, **options)


@pytest.mark.parametrize(
    ("key", "value", "slots", "message"),
    [
        ((2, 2, 32), (2, 2, 64), torch.zeros(2).long(), r"key must have shape \[2, 2, 64\]"),
        ((2, 2, 64), (2, 1, 64), torch.zeros(2).long(), r"value must have shape \[2, 2, 64\]"),
        ((2, 2, 64), (2, 2, 64), torch.zeros(3).long(), r"key must have shape \[3, 2, 64\]"),
        ((2, 2, 64), (2, 2, 64), torch.zeros(2).int(), "slots must be int64"),
    ],
)
def test_rows_to_store_are_checked(
    backend: CpuBackend,
    step: Step,
    key: tuple[int, ...],
    value: tuple[int, ...],
    slots: torch.Tensor,
    message: str,
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        backend.store(step.layer, torch.zeros(key), torch.zeros(value), slots)


def test_lost_gradients_are_refused(backend: CpuBackend, step: Step) -> None:
    query = step.query.clone().requires_grad_()
    with pytest.raises(UnsupportedError, match=r"query requires a gradient.*torch\.no_grad"):
        backend.run(query, step.layer, step.meta, scale=1.0)
    with pytest.raises(UnsupportedError, match="key requires a gradient"):
        backend.store(step.layer, step.key[:1].requires_grad_(), step.value[:1], step.slots[:1])
    with torch.no_grad():
        assert backend.run(query, step.layer, step.meta, scale=1.0).shape == query.shape


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ([0, 7], [1, 2], r"source.*0\.\.6"),
        ([0, 1], [1, -1], r"target.*0\.\.6"),
        ([0, 1], [1], "target must have shape"),
    ],
)
def test_pages_to_copy_are_checked(
    backend: CpuBackend, step: Step, source: list[int], target: list[int], message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        backend.copy_pages([step.layer], torch.tensor(source), torch.tensor(target))


def test_tensor_on_another_device_is_refused(backend: CpuBackend, step: Step) -> None:
    with pytest.raises(InvalidInputError, match="query must be on cpu, got meta"):
        backend.run(step.query.to("meta"), step.layer, step.meta, scale=1.0)


def test_latent_pages_are_refused(backend: CpuBackend, step: Step) -> None:
    layout = PageLayout(1, 64, torch.float32, planes=1, swizzle=False)
    pages = torch.zeros(layout.shape(7))
    layer = type(step.layer)(pages, layout)
    with pytest.raises(UnsupportedError, match="planes=1"):
        backend.run(step.query, layer, step.meta, scale=1.0)
