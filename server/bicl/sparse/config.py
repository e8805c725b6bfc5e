"""What HySparse may be told, and what it refuses."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from bicl.errors import ConfigError
from bicl.sparse.policy import KindRule, parse_kind_rules

__all__ = [
    "COMBINES",
    "MAX_SPARSITY",
    "MODES",
    "REFERENCE_DEPTH",
    "TEXT_KINDS",
    "VARIANTS",
    "WINDOW_TOKENS",
    "HySparseConfig",
]

WINDOW_TOKENS = 64
"""Tokens of a window: what ``first``, ``recent`` and ``max_k`` count."""

REFERENCE_DEPTH = 32
"""Layers of the model that a bare range such as ``10-28`` speaks of."""

MODES = ("select", "compact")
VARIANTS = ("centroids", "bounds", "gate")
"""What a page's index holds: means of clusters of its keys, their minimum and maximum, or its mean
gated key."""

COMBINES = ("softmax", "sum", "max")
"""How the query heads of one KV head agree on one choice: each head's softmax over the pages,
summed; or the sum or the maximum of the scores as they are."""

TEXT_KINDS = ("auto", "off", "chat", "news", "code", "legal")

MAX_SPARSITY = 0.95
_RANGES = re.compile(r"(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)(?:/(\d+))?")


@dataclass(frozen=True)
class HySparseConfig:
    """Settings of a server or of one request.

    Attributes:
        sparsity_ratio: share of a sequence's windows that a sparse layer leaves out, first and
            recent windows counted among the kept ones; 0 is dense.
        layers: which layers are sparse, numbered from 0, both ends included: ``10-28`` of 32,
            scaled to the model's depth; ``10-28/40`` says the depth that is meant; ``4,9-12/16``.
        max_k: most windows that a sequence reads in a sparse layer.
        mode: ``select`` (all pages stay, a step reads some) or ``compact`` (the rest is released).
        floor_tokens: a sequence never reads fewer tokens than these in a sparse layer: up to that
            length the result is dense, bit for bit.
        min_skipped_mb: a decode step on a GPU runs dense if a sparse layer would leave out less
            than these (10**6 bytes, all rows together): choosing would cost more than it saves.
            32 is where both meet on an H200.
        first, recent: windows at either end of a sequence that are always kept.
        variant: what the index of a page holds.
        combine: how the query heads of a KV head agree.
        gate_path: safetensors file that ``bicl hysparse fit`` wrote; None starts analytically.
        text_kind: what the texts are; ``auto`` classifies each prompt, ``off`` treats all alike.
        kind_rules: changes to what a kind of text gets, its share of the ratio and its newest
            windows: ``code=0.8:4,chat=0.9``.
        enable_sg: always keep tokens at the boundaries of syntax nodes.
        force: run although a refusal applies; the message of each is logged instead.

    Raises:
        ConfigError: naming the value, the limit and the remedy.
    """

    sparsity_ratio: float = 0.65
    layers: str = "10-28"
    max_k: int = 512
    mode: str = "select"
    floor_tokens: int = 1536
    min_skipped_mb: int = 32
    first: int = 1
    recent: int = 2
    variant: str = "centroids"
    combine: str = "softmax"
    gate_path: str | None = None
    text_kind: str = "auto"
    kind_rules: str = ""
    enable_sg: bool = False
    force: bool = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.sparsity_ratio <= MAX_SPARSITY:  # refuses NaN too
            raise ConfigError(
                f"sparsity_ratio is {self.sparsity_ratio}; use 0 (dense) to {MAX_SPARSITY}, "
                "0.6 to 0.7 suit most models"
            )
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"{name} {getattr(self, name)!r} is not supported; use one of "
                    f"{', '.join(allowed)}"
                )
        if self.first < 1 or self.recent < 1:
            raise ConfigError(
                f"first is {self.first} and recent is {self.recent}; both must be at least 1: "
                "models collapse without their first tokens, and the newest page has no index yet"
            )
        if self.max_k <= self.first + self.recent:
            raise ConfigError(
                f"max_k is {self.max_k} windows, of which {self.first + self.recent} are the first "
                f"and recent ones that are always kept; use at least {self.first + self.recent + 1}"
            )
        if self.floor_tokens < 0:
            raise ConfigError(f"floor_tokens is {self.floor_tokens}; it must not be negative")
        if self.min_skipped_mb < 0:
            raise ConfigError(
                f"min_skipped_mb is {self.min_skipped_mb}; use 32, or 0 to leave tiles out "
                "whatever choosing them costs"
            )
        if self.floor_tokens > self.max_k * WINDOW_TOKENS:
            raise ConfigError(
                f"floor_tokens {self.floor_tokens} is more than max_k {self.max_k} windows of "
                f"{WINDOW_TOKENS} tokens ever keep; lower it to {self.max_k * WINDOW_TOKENS}"
            )
        self.sparse_layers(REFERENCE_DEPTH)
        for kind, rule in parse_kind_rules(self.kind_rules).items():
            if rule.windows and not self.recent <= rule.windows < self.max_k - self.first:
                raise ConfigError(
                    f"kind_rules: {rule.windows} windows of {kind}; of any text {self.recent} are "
                    f"kept, and {self.max_k - self.first - 1} leave room for one that is chosen"
                )

    def kind_rule(self, kind: str) -> KindRule:
        """What a kind of text gets; of an unknown one, what all get."""
        return parse_kind_rules(self.kind_rules).get(kind, KindRule())

    def sparse_layers(self, depth: int) -> tuple[int, ...]:
        """Numbers of the sparse layers of a model of ``depth`` layers, ascending.

        A layer is sparse if its first edge, as a share of the depth, lies in the range.
        """
        match = _RANGES.fullmatch(self.layers.replace(" ", ""))
        if match is None:
            raise ConfigError(
                f"layers {self.layers!r} is not a list of ranges; write 10-28 (of "
                f"{REFERENCE_DEPTH} layers, scaled to the model) or 10-28/40 (of 40)"
            )
        of = int(match[2] or REFERENCE_DEPTH)
        chosen: set[int] = set()
        for part in match[1].split(","):
            first, _, last = part.partition("-")
            begin, end = int(first), int(last or first) + 1
            if not begin < end <= of:
                raise ConfigError(
                    f"layers {self.layers!r}: {part} is no range of layers 0-{of - 1}; "
                    "write the smaller number first, or the depth after a slash: 10-28/40"
                )
            chosen.update(range(round(begin * depth / of), round(end * depth / of)))
        return tuple(sorted(chosen))

    def for_request(self, overrides: dict[str, Any] | None) -> HySparseConfig:
        """A copy with what one request asks for (``hy_sparse_config``).

        Raises:
            ConfigError: an unknown key or a value out of range.
        """
        allowed = {"sparsity_ratio", "enable_sg"}
        if unknown := sorted(set(overrides or {}) - allowed):
            raise ConfigError(
                f"hy_sparse_config has unknown keys {', '.join(unknown)}; a request may set "
                f"{' and '.join(sorted(allowed))}, the rest belongs to the server's flags"
            )
        return replace(self, **overrides) if overrides else self


_CHOICES = {
    "mode": MODES,
    "variant": VARIANTS,
    "combine": COMBINES,
    "text_kind": TEXT_KINDS,
}
