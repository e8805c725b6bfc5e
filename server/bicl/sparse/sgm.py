"""The Spatial Gating Module: the few parameters that judge pages and tokens unread.

Three forms, each under 5,000 parameters a model:

``CentroidGate``
    a weight a dimension for the centroids of a few clusters of a page's keys; what decode uses by
    default.
``BoundGate``
    two weights a dimension for the centre and the half width of the box around a page's keys.
``SpatialGate``
    the literal form: queries and keys projected to 128 dimensions by a diagonal plus low rank,
    compared by their cosine, one module for all layers and heads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from bicl.errors import ConfigError
from bicl.ops.cpu.sparse import bound_scores, centroid_rows, centroid_scores

__all__ = [
    "CENTROID_TOKENS",
    "GATE_DIM",
    "MAX_PARAMETERS",
    "PAGE_GATES",
    "BoundGate",
    "CentroidGate",
    "Gate",
    "PageGate",
    "SpatialGate",
    "check_gate",
    "make_gate",
    "principal_directions",
    "soft_top_k",
]

GATE_DIM = 128
MAX_PARAMETERS = 4_999
CENTROID_TOKENS = 8
"""Tokens of a page for each centroid of its index."""
START_SLACK = 0.5
"""Start weight of a box's half width. 1 is Quest's upper bound; at 64 keys a box half of it ranks
better (SmolLM2, 6k tokens, 35 % of the pages kept: 4.5 % of the attention lost against 5.6 %)."""
START_SHARPNESS = 16.0


class PageGate(nn.Module, ABC):
    """Weights of each dimension for what the index keeps of a page, shared by a layer's heads, and
    each layer's ``shares``: what its ratio is of the one that was asked for. Their mean is 1.

    Models whose sparse layers would need more than 5,000 weights share them among neighbours.

    Args:
        layers: numbers of the sparse layers.
        head_dim: the model's.
    """

    kind: str
    START: tuple[float, ...]
    """Of the sets of weights that a layer has, where nothing was fitted."""

    def __init__(self, layers: Sequence[int], head_dim: int) -> None:
        super().__init__()
        self.layers = tuple(layers)
        self.head_dim = head_dim
        groups = min(len(self.layers), MAX_PARAMETERS // (len(self.START) * head_dim))
        if groups < 1:
            raise ConfigError(
                f"a gate for {len(self.layers)} layers of head_dim {head_dim} does not fit into "
                f"{MAX_PARAMETERS} parameters; name at least one sparse layer, head_dim at most "
                f"{MAX_PARAMETERS // len(self.START)}"
            )
        start = torch.tensor(self.START).view(1, -1, 1)
        self.weights = nn.Parameter(start.repeat(groups, 1, head_dim))
        self.shares: torch.Tensor
        self.register_buffer("shares", torch.ones(len(self.layers)))

    def share_of(self, layer: int) -> float:
        return float(self.shares[self.layers.index(layer)])

    def weights_of(self, layer: int) -> torch.Tensor:
        """float32 ``[sets, head_dim]``."""
        place = self.layers.index(layer)
        weights: torch.Tensor = self.weights[place * len(self.weights) // len(self.layers)]
        return weights

    @staticmethod
    @abstractmethod
    def describe(keys: torch.Tensor) -> torch.Tensor:
        """Index rows, float32 ``[n, H, rows, dims]``, of full pages ``[n, H, page_size, D]``."""

    @staticmethod
    @abstractmethod
    def score(
        query: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """float32 ``[B, Hq, W]`` of ``query`` ``[B, Hq, D]``, ``rows`` ``[B, H, W, rows, dims]``
        and a layer's weights."""


class CentroidGate(PageGate):
    """A page as the centroids of a few clusters of its keys, and how far the keys lie around them;
    one weight a dimension."""

    kind = "centroids"
    START = (1.0,)

    @staticmethod
    def describe(keys: torch.Tensor) -> torch.Tensor:
        return centroid_rows(keys, keys.shape[2] // CENTROID_TOKENS)

    @staticmethod
    def score(
        query: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, scale: float
    ) -> torch.Tensor:
        return centroid_scores(query, rows, weights[0], scale)


class BoundGate(PageGate):
    """A page as the box around its keys; two weights a dimension, of centre and half width."""

    kind = "bounds"
    START = (1.0, START_SLACK)

    @staticmethod
    def describe(keys: torch.Tensor) -> torch.Tensor:
        return torch.stack((keys.amin(dim=2), keys.amax(dim=2)), dim=2)

    @staticmethod
    def score(
        query: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, scale: float
    ) -> torch.Tensor:
        return bound_scores(query, rows, weights, scale)


class SpatialGate(nn.Module):
    """``head_dim -> 128`` for queries and for keys: ``x -> pad(diag * x) + up (down x)``.

    Projections run in the dtype of their input, the cosine in float32: fp16 cosines overflow into
    NaN. The start is the identity (head_dim <= 128) or, with ``basis``, the principal directions
    of the keys.

    Args:
        head_dim: the model's.
        basis: ``[128, head_dim]`` orthonormal rows to start from where head_dim is more than 128.
    """

    kind = "gate"

    def __init__(self, head_dim: int, basis: torch.Tensor | None = None) -> None:
        super().__init__()
        self.head_dim = head_dim
        kept = min(head_dim, GATE_DIM)
        self.rank = (MAX_PARAMETERS - 1 - 2 * kept) // (2 * (head_dim + GATE_DIM))
        if self.rank < 1:
            raise ConfigError(
                f"head_dim {head_dim} leaves a gate of {MAX_PARAMETERS} parameters no rank; use "
                "variant bounds"
            )
        for side in ("query", "key"):
            self.register_parameter(f"{side}_diag", nn.Parameter(torch.ones(kept)))
            down = (
                torch.randn(self.rank, head_dim, generator=torch.Generator().manual_seed(0))
                / head_dim**0.5
            )
            self.register_parameter(f"{side}_down", nn.Parameter(down))
            self.register_parameter(f"{side}_up", nn.Parameter(torch.zeros(GATE_DIM, self.rank)))
        self.log_sharpness = nn.Parameter(torch.tensor(START_SHARPNESS).log())
        if basis is None:
            basis = torch.eye(GATE_DIM, head_dim)
        self.register_buffer("basis", basis[:kept].clone())

    def matrix(self, side: str) -> torch.Tensor:
        """float32 ``[128, head_dim]`` of ``"query"`` or ``"key"``."""
        diag, down, up = (getattr(self, f"{side}_{part}") for part in ("diag", "down", "up"))
        own = F.pad(diag[:, None] * self.basis, (0, 0, 0, GATE_DIM - len(diag)))
        matrix: torch.Tensor = own + up @ down
        return matrix

    def project(self, x: torch.Tensor, side: str) -> torch.Tensor:
        """Unit directions, float32 ``[..., 128]``; the projection itself in the dtype of ``x``."""
        return F.normalize((x @ self.matrix(side).to(x.dtype).t()).float(), dim=-1)

    @property
    def sharpness(self) -> torch.Tensor:
        """What cosines are multiplied by, to compare like scores."""
        return torch.exp(self.log_sharpness)


Gate = PageGate | SpatialGate
PAGE_GATES: dict[str, type[PageGate]] = {gate.kind: gate for gate in (CentroidGate, BoundGate)}


def make_gate(
    kind: str, layers: Sequence[int], head_dim: int, basis: torch.Tensor | None = None
) -> Gate:
    """The analytic start: nothing fitted yet. ``basis``: see :class:`SpatialGate`."""
    if kind in PAGE_GATES:
        return PAGE_GATES[kind](layers, head_dim)
    return SpatialGate(head_dim, basis)


def principal_directions(keys: torch.Tensor) -> torch.Tensor:
    """The 128 directions in which keys ``[n, D]`` differ most, orthonormal rows ``[128, D]``."""
    centred = (keys - keys.mean(dim=0)).double()
    vectors: torch.Tensor = torch.linalg.eigh(centred.t() @ centred)[1]  # ascending
    return vectors.flip(1)[:, :GATE_DIM].t().float()


def check_gate(gate: Gate, kind: str, layers: Sequence[int], head_dim: int) -> None:
    """Refuse a gate made for something else.

    Raises:
        ConfigError: naming both sides.
    """
    if gate.kind != kind:
        raise ConfigError(
            f"the gate is of kind {gate.kind}, the index of kind {kind}; start with "
            f"--hysparse-variant {gate.kind}, or fit one with --variant {kind}"
        )
    if gate.head_dim != head_dim:
        raise ConfigError(
            f"the gate was made for head_dim {gate.head_dim}, the model has {head_dim}; run "
            "bicl hysparse fit on this model"
        )
    if isinstance(gate, PageGate) and (missing := sorted(set(layers) - set(gate.layers))):
        raise ConfigError(
            f"the gate was fitted for layers {gate.layers[0]}-{gate.layers[-1]}, but layers "
            f"{', '.join(map(str, missing))} are sparse too; run bicl hysparse fit with the same "
            "--hysparse-layers"
        )


def soft_top_k(scores: torch.Tensor, k: torch.Tensor, softness: float) -> torch.Tensor:
    """The differentiable stand-in for a top-K: ``sigmoid((s - t) / softness)``, summing to ``k``.

    The threshold ``t`` is found by bisection; one Newton step on top of it carries the gradient
    of ``t`` with respect to all scores.

    Args:
        scores: float32 ``[..., n]``; -inf never counts.
        k: float32 ``[...]``, less than the finite scores of each row.

    Returns:
        float32 ``[..., n]`` in 0..1.
    """
    with torch.no_grad():
        finite = scores.isfinite()
        span = 20.0 * softness
        low = scores.masked_fill(~finite, torch.inf).amin(-1) - span
        high = scores.amax(-1) + span
        for _ in range(40):
            middle = (low + high) / 2
            over = torch.sigmoid((scores - middle[..., None]) / softness).sum(-1) > k
            low, high = torch.where(over, middle, low), torch.where(over, high, middle)
        middle = (low + high) / 2
    kept = torch.sigmoid((scores - middle[..., None]) / softness)
    slope = (kept * (1.0 - kept)).sum(-1).detach().clamp_min(1e-6) / softness
    threshold = middle + (kept.sum(-1) - k) / slope
    return torch.sigmoid((scores - threshold[..., None]) / softness)
