"""How many tiles a sequence reads: the one statement of the rule, mirrored by the kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from bicl.cache.layout import PageLayout
from bicl.sparse.config import WINDOW_TOKENS, HySparseConfig

__all__ = ["ROUNDING", "SelectionRule", "least_skipped", "tiles_by_layer", "tiles_to_keep"]

ROUNDING = 1.0 / 64.0
"""Added before a share is rounded down: 0.65 of 100 is 64.99999 in float32, and means 65."""


@dataclass(frozen=True)
class SelectionRule:
    """Numbers of tiles (= pages); all kernels take these five, nothing else.

    Attributes:
        max_k: most tiles a sparse row keeps.
        first, recent: tiles at either end that are always kept.
        floor: a sparse row never keeps fewer.
        page_size: tokens a tile.
    """

    page_size: int
    max_k: int
    first: int
    recent: int
    floor: int

    @classmethod
    def of(cls, config: HySparseConfig, page_size: int) -> SelectionRule:
        """The config's windows of 64 tokens in pages of ``page_size``."""
        per_window = WINDOW_TOKENS // page_size
        return cls(
            page_size=page_size,
            max_k=config.max_k * per_window,
            first=config.first * per_window,
            recent=config.recent * per_window,
            floor=math.ceil(config.floor_tokens / page_size),
        )

    def tiles_to_keep(self, num_tiles: torch.Tensor, sparsity: torch.Tensor) -> torch.Tensor:
        """See :func:`tiles_to_keep`."""
        return tiles_to_keep(num_tiles, sparsity, self)

    def with_windows(self, windows: int) -> SelectionRule:
        """The rule of a row that always reads so many newest windows, if they are more."""
        newest = windows * (WINDOW_TOKENS // self.page_size)
        return self if newest <= self.recent else replace(self, recent=newest)

    @property
    def always(self) -> int:
        """Fewest tiles that a sparse row keeps."""
        return max(self.floor, self.first + self.recent)


def least_skipped(config: HySparseConfig, layout: PageLayout, device: torch.device) -> int:
    """Tiles that all rows of a step together must leave out of a layer for choosing to pay.

    Choosing costs some microseconds a layer however few there are, in which a GPU reads tens of
    megabytes. A CPU, which reads slower and launches nothing, gains from the first one.
    """
    if device.type != "cuda":
        return 1
    return max(1, math.ceil(config.min_skipped_mb * 1_000_000 / layout.page_bytes))


def tiles_by_layer(
    num_tiles: torch.Tensor, sparsity: torch.Tensor, rule: SelectionRule, shares: torch.Tensor
) -> torch.Tensor:
    """int32 ``[layers, B]``: :func:`tiles_to_keep` where each layer has a share (float32
    ``[layers]``) of the rows' sparsity."""
    own = sparsity[None] * shares[:, None]
    return tiles_to_keep(num_tiles.expand_as(own), own, rule)


def tiles_to_keep(
    num_tiles: torch.Tensor, sparsity: torch.Tensor, rule: SelectionRule
) -> torch.Tensor:
    """Tiles that each row reads.

    ``kept = n - floor(s * n + 1/64)`` in float32, then at least ``rule.always``, at most
    ``rule.max_k``, at most ``n``; a row with ``s <= 0`` keeps all ``n``. Never falls as n grows.

    Args:
        num_tiles: int32 ``[B]``, ``ceil(cache_seqlens / page_size)``.
        sparsity: float32 ``[B]``.

    Returns:
        int32 ``[B]``.
    """
    skipped = (num_tiles.float() * sparsity + ROUNDING).floor().int()
    kept = (num_tiles - skipped).clamp(rule.always, rule.max_k)
    return torch.where(sparsity > 0.0, kept, num_tiles).minimum(num_tiles)
