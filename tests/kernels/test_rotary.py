"""Rotary embedding on the GPU against its twin in float32."""

from __future__ import annotations

import math

import pytest
import torch
from support.cases import pairwise

from bicl.ops.cpu.rotary import rotate as twin
from bicl.ops.cuda.rotary import rotate

pytestmark = pytest.mark.gpu

CASES = list(
    pairwise(
        dtype=(torch.float16, torch.bfloat16),
        head_and_rotary_dim=(
            (64, 64),
            (80, 80),
            (96, 48),
            (128, 128),
            (100, 20),
            (128, 2),
            (256, 64),
        ),
        heads=((1, 1), (5, 3), (32, 8)),
        tokens=(1, 33, 700),
        rows=("contiguous", "parts of one product", "odd strides"),
    )
)


def rows_of(kind: str, tokens: int, heads: tuple[int, int], dim: int) -> list[torch.Tensor]:
    """Query and key inside a tensor of NaN, float32 on the CPU."""
    if kind == "parts of one product":
        whole = torch.full((tokens, sum(heads) + heads[1], dim), math.nan)
        whole[:, : sum(heads)].normal_()
        return [whole[:, : heads[0]], whole[:, heads[0] : sum(heads)], whole]
    extra = 0 if kind == "contiguous" else 3
    whole = torch.full((2, tokens + 1, max(heads), dim + extra), math.nan)
    found = [whole[i, :tokens, :n, extra:] for i, n in enumerate(heads)]
    for rows in found:
        rows.normal_()
    return [*found, whole]


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c.values())))
def test_heads_turn_as_in_float32_and_nothing_else_changes(case: dict[str, object]) -> None:
    dtype, tokens = case["dtype"], case["tokens"]
    dim, size = case["head_and_rotary_dim"]
    torch.manual_seed(0)
    query, key, whole = rows_of(case["rows"], tokens, case["heads"], dim)
    angle = torch.rand(tokens, size) * 6
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    given = whole.to(dtype)
    ours = given.cuda()
    own = [ours.as_strided(x.shape, x.stride(), x.storage_offset()) for x in (query, key)]
    truth = given.float()
    exact = [truth.as_strided(x.shape, x.stride(), x.storage_offset()) for x in (query, key)]
    rotate(*own, cos.cuda(), sin.cuda())
    twin(*exact, cos.float(), sin.float())
    got = ours.cpu()
    assert torch.equal(got.isnan(), given.isnan())
    torch.testing.assert_close(
        got.float(), truth.to(dtype).float(), rtol=torch.finfo(dtype).eps, atol=1e-6, equal_nan=True
    )


def test_every_replay_of_a_graph_turns_once() -> None:
    query = torch.randn(4, 8, 128, device="cuda").bfloat16()
    key, angle = query[:, :2].clone(), torch.rand(4, 128, device="cuda")
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    rotate(query.clone(), key.clone(), cos, sin)
    expected = query.cpu(), key.cpu()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rotate(query, key, cos, sin)
    for _ in range(3):
        graph.replay()
        twin(*expected, cos.cpu(), sin.cpu())
    tolerance = 4 * torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(query.cpu(), expected[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(key.cpu(), expected[1], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": torch.zeros(3, 2, 64)}, "key has shape"),
        ({"cos": torch.zeros(2, 63)}, "sin has shape"),
        ({"cos": torch.zeros(2, 66), "sin": torch.zeros(2, 66)}, "rotates 66 of 64 dims"),
        ({"query": torch.zeros(2, 4, 64).double()}, "query has dtype"),
        ({"sin": torch.zeros(2, 64).float()}, "sin must have the query's dtype"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    change: dict[str, torch.Tensor], message: str
) -> None:
    given = {
        "query": torch.zeros(2, 4, 64),
        "key": torch.zeros(2, 2, 64),
        "cos": torch.zeros(2, 64),
        "sin": torch.zeros(2, 64),
    }
    kept = {"query": torch.float64, "sin": torch.float32}
    halves = {n: t.half() for n, t in (given | change).items()}
    for name in change:
        if name in kept and message.endswith("dtype"):
            halves[name] = change[name]
    with pytest.raises(ValueError, match=message):
        rotate(*(halves[name].cuda() for name in ("query", "key", "cos", "sin")))
