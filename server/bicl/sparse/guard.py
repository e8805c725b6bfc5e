"""When a request goes back to the full cache: the bounds, and one request's watch over them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bicl.errors import ConfigError

__all__ = ["FALLBACK_REASONS", "Guard", "GuardBounds", "Signals"]

FALLBACK_REASONS = ("index", "mass", "drift")
"""``index``: index rows that do not describe their pages. ``mass``: too little of the attention
lay in the tiles read. ``drift``: fewer tiles left out than the rule says, and flatter attention."""


@dataclass(frozen=True)
class GuardBounds:
    """What is measured how often, and what is too much.

    Attributes:
        shadow_interval: decode steps between two measurements of a request.
        min_mass_kept: least share of the attention mass that the tiles read must hold.
        min_sparsity_share: least share of the expected sparsity that is measured, and
        max_entropy_rise: most that entropy may rise over a request's first measurement; both
            together are the drift from 0.65 to 0.5 under 15 % more entropy of the specification.

    Raises:
        ConfigError: naming the value, what is allowed and what to do.
    """

    shadow_interval: int = 32
    min_mass_kept: float = 0.8
    min_sparsity_share: float = 0.77
    max_entropy_rise: float = 0.15

    def __post_init__(self) -> None:
        if self.shadow_interval < 1:
            raise ConfigError(
                f"shadow_interval is {self.shadow_interval}; at least every step (1) can be "
                "measured, and 32 costs about three per cent of a step"
            )
        for name in ("min_mass_kept", "min_sparsity_share"):
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                raise ConfigError(f"{name} is {value}; use a share of 0 (never) to 1")
        if not self.max_entropy_rise >= 0.0:
            raise ConfigError(
                f"max_entropy_rise is {self.max_entropy_rise}; use 0.15, or 0 or more"
            )


@dataclass(frozen=True)
class Signals:
    """One measurement of one row.

    Attributes:
        expected, actual: share of the tiles left out, by the rule and as measured.
        mass_kept: share of the attention mass in the tiles read.
        entropy: of the dense attention in the sparse layers, in nats.
        stale_pages: pages of the row whose index rows do not fit them.
        entropy_by_group: the same of one layer before, among and after the sparse ones (``first``,
            ``sparse``, ``last``), where they were measured.
    """

    expected: float
    actual: float
    mass_kept: float
    entropy: float
    stale_pages: int = 0
    entropy_by_group: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Guard:
    """One request's watch."""

    bounds: GuardBounds
    _first_entropy: float | None = field(default=None, init=False)

    def judge(self, signals: Signals) -> str:
        """One of ``FALLBACK_REASONS``, or empty: go on."""
        if self._first_entropy is None:
            self._first_entropy = signals.entropy
        if signals.stale_pages:
            return "index"
        if not signals.mass_kept >= self.bounds.min_mass_kept:  # NaN is no good sign either
            return "mass"
        thin = signals.actual < self.bounds.min_sparsity_share * signals.expected
        flat = signals.entropy > (1.0 + self.bounds.max_entropy_rise) * self._first_entropy
        return "drift" if thin and flat else ""
