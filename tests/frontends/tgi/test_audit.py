"""The self-test's watcher sees what it is there to see."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compare import same_precision_attention

from bicl.cache.layout import PageLayout
from bicl.frontends.tgi.selftest.audit import _Audit, _Call

PAGES, PAGE, HEADS, DIM = 5, 64, 2, 64
TABLE = [3, 1]


class Cache:
    """A layer's pages, full of NaN."""

    def __init__(self) -> None:
        layout = PageLayout(HEADS, DIM, torch.float32)
        pages = torch.full(layout.shape(PAGES), float("nan"))
        self.layer = SimpleNamespace(
            layout=layout, pages=pages, num_pages=PAGES, device=torch.device("cpu")
        )


@pytest.fixture
def cache() -> Cache:
    return Cache()


@pytest.fixture
def audit(cache: Cache) -> _Audit:
    made = _Audit(every=1)
    made.watch([cache])
    return made


def decode_step(audit: _Audit, cache: Cache, length: int, **options: Any) -> _Call:
    """Stores a sequence and attends with its last token; the right answer is in the call."""
    torch.manual_seed(0)
    key, value = torch.randn(2, length, HEADS, DIM)
    slots = torch.tensor([TABLE[t // PAGE] * PAGE + t % PAGE for t in range(length)])
    audit.stored(cache, key, value, slots)
    query = torch.randn(1, 2 * HEADS, DIM)
    shape = {"scale": 0.125, "causal": True} | options
    out = same_precision_attention(query, key, value, **shape)
    meta = SimpleNamespace(
        page_table=torch.tensor([[*TABLE, 1 << 29]], dtype=torch.int32),
        cache_seqlens=torch.tensor([length], dtype=torch.int32),
        cu_seqlens_q=None,
        causal=True,
    )
    window, softcap = options.get("window_left", -1), options.get("softcap", 0.0)
    return _Call(query, out, meta, 0.125, window, softcap)


@pytest.mark.parametrize("options", [{}, {"window_left": 20}, {"softcap": 2.0}])
def test_right_attention_is_found_right(
    audit: _Audit, cache: Cache, options: dict[str, Any]
) -> None:
    audit.attended(cache, decode_step(audit, cache, 100, **options))
    audit.end_step()
    assert audit.difference.rows == 1
    assert audit.difference.worst < 1e-5


def test_one_wrong_element_is_found(audit: _Audit, cache: Cache) -> None:
    call = decode_step(audit, cache, 100)
    call.out[0, 1, 5] += 0.5
    audit.attended(cache, call)
    audit.end_step()
    assert audit.difference.worst > 0.01


def test_key_that_was_left_out_is_found(audit: _Audit, cache: Cache) -> None:
    call = decode_step(audit, cache, 100)
    call.meta.cache_seqlens[0] = 99
    audit.attended(cache, call)
    audit.end_step()
    assert audit.difference.worst > 0.01


def test_nan_that_came_out_is_counted(audit: _Audit, cache: Cache) -> None:
    call = decode_step(audit, cache, 100)
    call.out[0] = float("nan")
    audit.attended(cache, call)
    audit.end_step()
    assert audit.difference.not_finite == 1


def test_each_graph_is_judged_by_the_step_that_it_recorded(audit: _Audit, cache: Cache) -> None:
    """Two graphs may be of as many rows."""
    right = decode_step(audit, cache, 100)
    wrong = replace(right, out=right.out + 0.5)
    (layer,) = audit.watched.values()
    for graph, call in (("one", right), ("other", wrong)):
        layer.capturing = call
        audit.end_capture(graph)
    audit.replayed = "one"
    audit.end_step()
    assert (audit.difference.graph_rows, audit.difference.worst < 1e-5) == (1, True)
    audit.replayed = "other"
    audit.end_step()
    assert (audit.difference.graph_rows, audit.difference.worst > 0.01) == (2, True)


def test_one_written_element_of_a_free_page_is_found(audit: _Audit, cache: Cache) -> None:
    assert audit.answer("written", [1, 2, 4]) == []
    cache.layer.pages[2].view(-1)[777] = 0.0
    assert audit.answer("written", [1, 2, 4]) == [2]
    audit.answer("poison", [2])
    assert audit.answer("written", [1, 2, 4]) == []


def test_one_altered_element_of_a_shared_page_is_found(audit: _Audit, cache: Cache) -> None:
    cache.layer.pages.fill_(1.0)
    before = audit.answer("digest", [0, 3])
    cache.layer.pages[3].view(-1)[5] = 1.0000001
    after = audit.answer("digest", [0, 3])
    assert (after[0] == before[0], after[1] == before[1]) == (True, False)


def test_pages_from_the_tiers_are_not_judged(audit: _Audit, cache: Cache) -> None:
    call = decode_step(audit, cache, 100)
    audit.brought([TABLE[0]])
    audit.attended(cache, call)
    audit.end_step()
    assert audit.difference.rows == 0
