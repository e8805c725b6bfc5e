"""A decode step's inputs reach a graph's own tensors, and nothing else changes there."""

from __future__ import annotations

import pytest
import torch

from bicl.ops.cuda.stage_step import bind_stage_step

pytestmark = pytest.mark.gpu

Step = dict[str, torch.Tensor]


def graph_inputs(rows: int, columns: int) -> Step:
    """Full of 77, as after another step."""
    return {
        "input_ids": torch.full((rows,), 77, dtype=torch.int64, device="cuda"),
        "positions": torch.full((rows,), 77, dtype=torch.int32, device="cuda"),
        "slots": torch.full((rows,), 77, dtype=torch.int64, device="cuda"),
        "input_lengths": torch.full((rows,), 77, dtype=torch.int32, device="cuda"),
        "cache_lengths": torch.full((rows,), 77, dtype=torch.int32, device="cuda"),
        "page_table": torch.full((rows, columns), 77, dtype=torch.int32, device="cuda"),
    }


def step_inputs(batch: int, columns: int) -> Step:
    generator = torch.Generator("cuda").manual_seed(batch)

    def ids(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(1, 999, shape, dtype=dtype, device="cuda", generator=generator)

    places = torch.randperm(7 * batch, device="cuda", generator=generator)[:batch]
    return {
        "input_ids": ids(batch, dtype=torch.int64),
        "positions": ids(batch, dtype=torch.int32),
        "slots": ids(7 * batch, dtype=torch.int64),
        "slot_places": places,
        "input_lengths": ids(batch, dtype=torch.int32),
        "cache_lengths": ids(batch, dtype=torch.int32),
        "page_table": ids(batch, columns, dtype=torch.int32),
    }


@pytest.mark.parametrize(
    ("batch", "rows", "columns"), [(1, 1, 1), (3, 4, 260), (4, 4, 129), (70, 128, 33), (0, 2, 5)]
)
def test_rows_are_copied_and_the_rest_is_empty(batch: int, rows: int, columns: int) -> None:
    # A smaller graph's tensors are the head of a larger one's.
    whole = graph_inputs(rows + 2, columns + 3)
    target = {name: tensor[:rows] for name, tensor in whole.items()}
    step = step_inputs(batch, columns)
    bind_stage_step(**target)(*step.values())
    expected = graph_inputs(rows + 2, columns + 3)
    for name in ("slots", "input_lengths", "cache_lengths"):
        expected[name][:rows] = 0
    for name in ("input_ids", "positions", "input_lengths", "cache_lengths"):
        expected[name][:batch] = step[name]
    expected["slots"][:batch] = step["slots"][step["slot_places"]]
    expected["page_table"][:batch, :columns] = step["page_table"]
    for name, tensor in whole.items():
        assert torch.equal(tensor, expected[name]), name


def test_a_step_too_large_for_its_graph_is_refused() -> None:
    stage = bind_stage_step(**graph_inputs(4, 8))
    with pytest.raises(ValueError, match="a step of 5 sequences for a graph of 4"):
        stage(*step_inputs(5, 8).values())
    with pytest.raises(ValueError, match="a page table of 9 columns for a graph of 8"):
        stage(*step_inputs(4, 9).values())


@pytest.mark.parametrize("name", ["input_ids", "positions", "slot_places", "page_table"])
def test_other_dtypes_are_refused_by_name(name: str) -> None:
    step = step_inputs(2, 3)
    step[name] = step[name].to(torch.int16)
    with pytest.raises(ValueError, match=name):
        bind_stage_step(**graph_inputs(2, 3))(*step.values())
