"""Which layers of a decode step share a plan. It needs no GPU: the library is a stand-in."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.cases import build_step

from bicl.attention.metadata import AttentionMetadata
from bicl.attention.pool import KVPool, LayerCache
from bicl.cache.layout import PageLayout
from bicl.ops.cuda import library
from bicl.ops.cuda import linear as products
from bicl.ops.cuda.decode_attention import MIN_BATCH, DecodePlanner, leaves_sms_idle

LAYOUT = PageLayout(2, 64, torch.float16)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """The arguments of each plan that was launched."""
    launched: list[tuple[object, ...]] = []
    module = SimpleNamespace(
        decode_plan_bytes=lambda batch: 16 * batch,
        plan_decode=lambda *given: launched.append(given),
    )
    monkeypatch.setattr(library, "module", lambda: module)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return launched


def layer(layout: PageLayout = LAYOUT) -> LayerCache:
    return KVPool([layout], 2, "cpu").layers[0]


def step(batch: int = 2) -> AttentionMetadata:
    return build_step([(1, 3)] * batch, LAYOUT, group=1, dtype=torch.float16).meta


def plan_for(
    planner: DecodePlanner,
    layer: LayerCache,
    meta: AttentionMetadata,
    num_q_heads: int,
    window: int,
) -> tuple[torch.Tensor | None, bool]:
    return planner.plan_for(planner.kind_of(layer, num_q_heads, window), layer, meta)


def test_layers_alike_share_a_plan(made: list[tuple[object, ...]]) -> None:
    planner, meta = DecodePlanner(), step()
    planner.begin_step(meta)
    first, is_new = plan_for(planner, layer(), meta, 4, -1)
    assert is_new
    assert plan_for(planner, layer(), meta, 4, -1) == (first, False)
    assert len(made) == 1
    assert made[0][0] is first


def test_other_heads_windows_and_layouts_have_plans_of_their_own(
    made: list[tuple[object, ...]],
) -> None:
    planner, meta = DecodePlanner(), step()
    planner.begin_step(meta)
    other = layer(PageLayout(2, 64, torch.bfloat16))
    for options in ((layer(), 4, -1), (layer(), 8, -1), (layer(), 4, 100), (other, 4, -1)):
        _, is_new = plan_for(planner, options[0], meta, *options[1:])
        assert is_new
    assert len({given[0].data_ptr() for given in made}) == 4  # type: ignore[attr-defined]


def test_every_step_plans_anew_in_the_same_memory(made: list[tuple[object, ...]]) -> None:
    planner, meta = DecodePlanner(), step()
    for _ in range(3):
        planner.begin_step(meta)
        assert plan_for(planner, layer(), meta, 4, -1)[1]
    assert len(made) == 3
    assert len({given[0].data_ptr() for given in made}) == 1  # type: ignore[attr-defined]


def test_a_step_that_was_not_begun_has_no_plan(made: list[tuple[object, ...]]) -> None:
    planner = DecodePlanner()
    assert plan_for(planner, layer(), step(), 4, -1) == (None, False)
    planner.begin_step(step())
    assert plan_for(planner, layer(), step(), 4, -1) == (None, False)
    assert not made


def test_a_graph_makes_its_own_plan(
    made: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    planner, meta = DecodePlanner(), step()
    planner.begin_step(meta)
    plan_for(planner, layer(), meta, 4, -1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert plan_for(planner, layer(), meta, 4, -1)[1]
    assert made[0][0] is not made[1][0]


def test_graphs_keep_the_memory_that_larger_batches_outgrow(
    made: list[tuple[object, ...]],
) -> None:
    planner = DecodePlanner()
    plans = []
    for batch in (2, MIN_BATCH + 1):
        meta = step(batch)
        planner.begin_step(meta)
        plans.append(plan_for(planner, layer(), meta, 4, -1)[0])
    assert plans[0] is not plans[1]
    assert any(plans[0] is kept for kept in planner._outgrown)


@pytest.mark.parametrize(
    ("pairs", "sms", "idle"),
    [(1, 132, True), (8, 132, True), (9, 132, False), (8, 114, False), (9, 148, True)],
)
def test_clusters_of_few_pairs_leave_sms_idle(pairs: int, sms: int, idle: bool) -> None:
    assert leaves_sms_idle(pairs, sms) is idle


@pytest.mark.parametrize(("pairs", "early"), [(None, True), (8, False), (16, True)])
def test_a_product_behind_few_pairs_waits_for_them(
    pairs: int | None, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[object, ...]] = []
    module = SimpleNamespace(few_rows_linear=lambda *given: calls.append(given))
    monkeypatch.setattr(library, "module", lambda: module)
    monkeypatch.setattr(products, "_sms", lambda device: 132)
    rows, weight = torch.zeros(1, 64), torch.zeros(16, 64)
    products.add_linear(torch.zeros(1, 16), rows, weight, attention_pairs=pairs)
    assert [call[-2:] for call in calls] == [(True, early)]
