"""Which decode steps go into a captured graph in one launch, and that the rest goes TGI's way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bicl.frontends.tgi import graph_step


class Replayed:
    def __init__(self) -> None:
        self.count = 0

    def replay(self) -> None:
        self.count += 1


class Model:
    def __init__(self, *sizes: int) -> None:
        self.cuda_graphs = {
            size: {
                "graph": Replayed(),
                "logits": torch.arange(size),
                "speculative_logits": None,
                **{name: torch.zeros(size) for name in graph_step.INPUTS},
            }
            for size in sizes
        }

    def forward(self, batch: Any, adapter_data: Any) -> tuple[str, None]:
        return "text-generation-inference", None


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What reaches the kernel: the size of its graph, then a step's tensors."""
    calls: list[tuple[Any, ...]] = []

    def bind(*fixed: torch.Tensor) -> Any:
        return lambda *step: calls.append((fixed[0].shape[0], *step))

    monkeypatch.setattr(graph_step, "bind_stage_step", bind)
    monkeypatch.setattr(Model, "forward", Model.forward)  # put back after the test
    graph_step.stage_in_one_launch(Model)
    return calls


def batch(rows: int, **changes: Any) -> Any:
    step = {
        "cu_seqlen_prefill": None,
        "speculative_ids": None,
        "input_ids": torch.zeros(rows),
        "position_ids": torch.ones(rows),
        "slots": torch.full((9,), 2),
        "slot_indices": torch.full((rows,), 3),
        "input_lengths_tensor": torch.full((rows,), 4),
        "cache_lengths_tensor": torch.full((rows,), 5),
        "block_tables_tensor": torch.full((rows, 2), 6),
    }
    return SimpleNamespace(**step | changes)


def test_a_step_enters_the_smallest_graph_that_holds_it(staged: list[tuple[Any, ...]]) -> None:
    model = Model(8, 4, 1)
    logits, speculative = model.forward(batch(3), None)
    ((size, *step),) = staged
    assert size == 4
    assert [int(each.flatten()[0]) for each in step] == [0, 1, 2, 3, 4, 5, 6]
    assert [graph["graph"].count for graph in model.cuda_graphs.values()] == [0, 1, 0]
    assert logits.tolist() == [0, 1, 2]
    assert speculative is None


def test_a_graph_is_bound_once(
    staged: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(4)
    model.forward(batch(2), None)
    monkeypatch.setattr(graph_step, "bind_stage_step", None)
    model.forward(batch(4), None)
    assert len(staged) == 2


@pytest.mark.parametrize(
    ("rows", "changes"),
    [
        (2, {"cu_seqlen_prefill": torch.zeros(3)}),
        (2, {"speculative_ids": torch.zeros(2, 2)}),
        (2, {"position_ids": torch.zeros(2, 3)}),
        (9, {}),
    ],
    ids=["prefill", "drafts", "positions of several kinds", "more rows than any graph"],
)
def test_other_steps_go_tgi_s_way(
    staged: list[tuple[Any, ...]], rows: int, changes: dict[str, Any]
) -> None:
    assert Model(8, 4).forward(batch(rows, **changes), None)[0] == "text-generation-inference"
    assert not staged


def test_without_graphs_every_step_goes_tgi_s_way(staged: list[tuple[Any, ...]]) -> None:
    assert Model().forward(batch(1), None)[0] == "text-generation-inference"
    assert not staged


def test_a_step_that_the_kernel_refuses_stops_the_shard(
    staged: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*fixed: torch.Tensor) -> Any:
        raise ValueError("slots must be int64")

    monkeypatch.setattr(graph_step, "bind_stage_step", refuse)
    with pytest.raises(RuntimeError, match="entering a CUDA graph failed: slots must be int64"):
        Model(4).forward(batch(2), None)
