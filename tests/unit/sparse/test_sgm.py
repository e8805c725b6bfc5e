"""The Spatial Gating Module: its size, its start, its arithmetic, its soft top-K."""

from __future__ import annotations

import pytest
import torch

from bicl.errors import ConfigError
from bicl.ops.cpu.sparse import bound_scores
from bicl.sparse.sgm import (
    BoundGate,
    SpatialGate,
    check_gate,
    make_gate,
    principal_directions,
    soft_top_k,
)


@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("layers", [1, 19, 48, 76])
@pytest.mark.parametrize("kind", ["centroids", "bounds", "gate"])
def test_a_model_has_fewer_than_5000_parameters(kind: str, layers: int, head_dim: int) -> None:
    gate = make_gate(kind, range(layers), head_dim)
    assert 0 < sum(p.numel() for p in gate.parameters()) < 5000


def test_every_layer_of_a_deep_model_has_weights_and_neighbours_share_them() -> None:
    gate = BoundGate(range(10, 90), 128)
    groups = [gate.weights_of(layer).data_ptr() for layer in range(10, 90)]
    assert len(set(groups)) == 19
    assert groups == sorted(groups)


def test_the_start_shrinks_the_boxes_and_the_identity_compares_raw_directions() -> None:
    query, boxes = torch.randn(2, 4, 16), torch.randn(2, 2, 5, 2, 16).sort(dim=3).values
    weights = torch.tensor([[1.0], [0.5]]).expand(2, 16)
    expected = bound_scores(query, boxes, weights, 0.25)
    assert torch.equal(
        BoundGate.score(query, boxes, BoundGate((3,), 16).weights_of(3), 0.25), expected
    )
    key = torch.randn(7, 64)
    cosine = SpatialGate(64).project(key, "query") @ SpatialGate(64).project(key, "key").t()
    torch.testing.assert_close(
        cosine,
        torch.nn.functional.normalize(key, dim=-1)
        @ (torch.nn.functional.normalize(key, dim=-1).t()),
    )


def test_keys_wider_than_the_gate_start_from_their_principal_directions() -> None:
    keys = torch.randn(2000, 160) * torch.linspace(0.1, 5, 160)
    basis = principal_directions(keys)
    torch.testing.assert_close(basis @ basis.t(), torch.eye(128), atol=1e-4, rtol=0)
    assert (keys @ basis.t()).var(0).sum() > 0.99 * keys[:, 32:].var(0).sum()
    gate = SpatialGate(160, basis)
    torch.testing.assert_close(gate.matrix("key"), basis)


def test_the_cosine_of_large_half_precision_keys_is_finite() -> None:
    """Norms of fp16 vectors overflow in fp16: 64 x 300^2 is 5.8 million."""
    key = torch.full((3, 64), 300.0, dtype=torch.float16)
    gate = SpatialGate(64)
    directions = gate.project(key, "key")
    assert directions.dtype == torch.float32
    torch.testing.assert_close(directions.norm(dim=-1), torch.ones(3), atol=1e-3, rtol=0)


def test_soft_top_k_sums_to_k_and_hardens_into_top_k() -> None:
    scores = torch.randn(5, 40)
    scores[:, 30:] = -torch.inf
    k = torch.full((5,), 7.0)
    soft = soft_top_k(scores, k, 0.3)
    torch.testing.assert_close(soft.sum(-1), k, atol=1e-3, rtol=0)
    assert not soft[:, 30:].any()
    hard = soft_top_k(scores, k, 1e-4).round()
    assert torch.equal(hard.topk(7).indices.sort().values, scores.topk(7).indices.sort().values)


def test_soft_top_k_has_the_gradient_of_its_definition() -> None:
    scores = torch.randn(2, 9, dtype=torch.float64, requires_grad=True)
    k = torch.full((2,), 3.0, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda s: soft_top_k(s, k, 0.5), scores, atol=1e-4)


@pytest.mark.parametrize(
    ("gate", "kind", "layers", "head_dim", "message"),
    [
        (BoundGate((1, 2), 64), "gate", (1,), 64, "kind bounds, the index of kind gate"),
        (BoundGate((1, 2), 64), "bounds", (1,), 128, "head_dim 64, the model has 128"),
        (BoundGate((1, 2), 64), "bounds", (1, 5), 64, "layers 5 are sparse too"),
        (SpatialGate(64), "bounds", (1,), 64, "kind gate, the index of kind bounds"),
    ],
)
def test_a_gate_made_for_something_else_is_refused(
    gate: BoundGate | SpatialGate, kind: str, layers: tuple[int, ...], head_dim: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_gate(gate, kind, layers, head_dim)


def test_head_dims_without_room_for_a_gate_are_refused() -> None:
    with pytest.raises(ConfigError, match="head_dim 3000"):
        BoundGate((1,), 3000)
    with pytest.raises(ConfigError, match="variant bounds"):
        SpatialGate(3000)
