"""One request's state under HySparse."""

from __future__ import annotations

from collections.abc import Mapping

from bicl.sparse.guard import Guard, Signals

__all__ = ["SparseRow"]


class SparseRow:
    """What one request asked for, what it got, and since when.

    Args:
        ratio: share of the tiles to leave out; 0 is dense.
        guard: watches its signals.
        kind: of its text, as classified; empty: nobody asked.
        windows: newest ones that are always read; 0: as many as of any text.
        boundaries: tokens that are always kept, the most important first.

    Attributes:
        asked: the ratio at the start; ``ratio`` falls to 0 with a fall-back.
        first_sparse: position of the first token that was computed with tiles left out. Its keys
            and values and all later ones are approximations: nobody else may be given them.
        tiles_read, tiles_total, mass_kept, entropy, entropy_by_group, shadow_steps, fallback: as in
            a request's ``details``.
    """

    def __init__(
        self,
        ratio: float,
        guard: Guard,
        *,
        kind: str = "",
        windows: int = 0,
        boundaries: tuple[int, ...] = (),
    ) -> None:
        self.asked = self.ratio = ratio
        self.first_sparse: int | None = None
        self.kind = kind
        self.windows = windows
        self.boundaries = boundaries
        self.tiles_read = 0
        self.tiles_total = 0
        self.entropy: float | None = None
        self.entropy_by_group: Mapping[str, float] = {}
        self.shadow_steps = 0
        self.fallback = ""
        self._guard = guard
        self._mass = 0.0
        self._since_shadow: int | None = None

    @property
    def path(self) -> str:
        """``sparse``, ``fallback`` or ``dense`` (as asked)."""
        if self.fallback:
            return "fallback"
        return "sparse" if self.ratio > 0.0 else "dense"

    @property
    def mass_kept(self) -> float | None:
        """Mean over the shadow steps."""
        return self._mass / self.shadow_steps if self.shadow_steps else None

    def is_due(self, interval: int) -> bool:
        """Whether its next sparse step is to be measured: the first, then every ``interval``-th."""
        return self._since_shadow is None or self._since_shadow >= interval - 1

    def is_exact(self, end: int) -> bool:
        """Whether its first ``end`` tokens were all computed dense."""
        return self.first_sparse is None or end <= self.first_sparse

    def approximate_from(self, position: int) -> None:
        """Tokens from ``position`` on are computed with tokens missing."""
        if self.first_sparse is None:
            self.first_sparse = position

    def count(self, position: int, read: int, total: int) -> None:
        """The token at ``position`` was computed with ``read`` of ``total`` tiles."""
        self.approximate_from(position)
        self.tiles_read += read
        self.tiles_total += total
        if self._since_shadow is not None:
            self._since_shadow += 1

    def learn(self, signals: Signals) -> bool:
        """Take a measurement; True: from now on it runs on the full cache."""
        self._since_shadow = 0
        self.shadow_steps += 1
        self._mass += signals.mass_kept
        self.entropy = signals.entropy
        self.entropy_by_group = signals.entropy_by_group
        self.fallback = self._guard.judge(signals)
        if self.fallback:
            self.ratio = 0.0
        return bool(self.fallback)

    def recomputed(self) -> None:
        """All its tokens are computed again, dense."""
        self.first_sparse = None
