"""How many tiles a sequence reads, and which compete for them: the one statement of the rule,
mirrored by the kernels.

The first ``f = min(first, n)`` of a row's ``n`` tiles and the newest, from
``e = max(f, n - recent)`` on, are always read. Of the ``c = e - f`` between them as many are taken
as ``kept`` leaves room for. They do not compete all with each other: a choice among thousands of
scores, on which a whole GPU has to agree, costs more than the scores. They are dealt out to ``S =
max(1, ceil(c / stratum))`` *strata* instead: of each block of ``S`` neighbours, which tend to
matter together, one goes to each. Stratum ``j`` gets position ``f + k S + (j - rot(k)) mod S`` of
block ``k``, and the blocks are turned against each other, ``rot(k) = (40503 k^2 mod 2^16) S >>
16``, since texts repeat at equal distances, which would all meet in one stratum. (So they do at
other distances where the turns are multiples of 40503, 2^16 over the golden ratio; by its squares
they spread as by chance.) The last block, where it is not whole, is not turned, and the first
strata get its tiles.

Each stratum takes its best, as many as the others, the first strata one more where that does not
come out even. That is never more than it has, so that each can choose alone. Of equal scores the
earlier position wins.

Where a row keeps everything, its list is its tiles in order. Else the first tiles come first, then
what each stratum took, stratum by stratum, the best first, then the newest, the last one at the
end: attention knows by its place which page is not full.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from bicl.cache.layout import PageLayout
from bicl.sparse.config import STRATUM_TOKENS, WINDOW_TOKENS, HySparseConfig

__all__ = [
    "ROUNDING",
    "SelectionRule",
    "Strata",
    "least_skipped",
    "strata",
    "tiles_by_layer",
    "tiles_to_keep",
]

ROUNDING = 1.0 / 64.0
"""Added before a share is rounded down: 0.65 of 100 is 64.99999 in float32, and means 65."""

_GOLDEN = 40503
"""2^16 over the golden ratio."""


@dataclass(frozen=True)
class SelectionRule:
    """Numbers of tiles (= pages); all kernels take these six, nothing else.

    Attributes:
        max_k: most tiles a sparse row keeps.
        first, recent: tiles at either end that are always kept.
        floor: a sparse row never keeps fewer.
        page_size: tokens a tile.
        stratum: most tiles that compete with each other; 0: all of a row.
    """

    page_size: int
    max_k: int
    first: int
    recent: int
    floor: int
    stratum: int

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
            stratum=STRATUM_TOKENS // page_size,
        )

    def tiles_to_keep(self, num_tiles: torch.Tensor, sparsity: torch.Tensor) -> torch.Tensor:
        """See :func:`tiles_to_keep`."""
        return tiles_to_keep(num_tiles, sparsity, self)

    def strata(self, num_tiles: torch.Tensor, kept: torch.Tensor, width: int) -> Strata:
        """See :func:`strata`."""
        return strata(num_tiles, kept, self, width)

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


@dataclass(frozen=True)
class Strata:
    """Which tiles of each row compete with each other, and for how much.

    Attributes:
        places: int64 ``[B, S, G]``, positions in each stratum, ascending; ``width`` past the last
            of them, and in all of a stratum that the row does not have.
        takes: int32 ``[B, S]``, how many of them are taken.
        begin, end: int32 ``[B]``, the tiles before and from on which all are.
    """

    places: torch.Tensor
    takes: torch.Tensor
    begin: torch.Tensor
    end: torch.Tensor


def strata(num_tiles: torch.Tensor, kept: torch.Tensor, rule: SelectionRule, width: int) -> Strata:
    """The tiles between the first and the newest, as this module's rule deals them out.

    Args:
        num_tiles: int32 ``[B]``, at most ``width`` each.
        kept: int32 ``[B]``, of :func:`tiles_to_keep`.
        width: of the page table; ``S`` and ``G`` depend on nothing else of a batch.
    """
    most = max(1, min(rule.stratum or width, width))
    begin = num_tiles.clamp(max=rule.first)
    end = (num_tiles - rule.recent).maximum(begin)
    count = end - begin
    own = ((count + most - 1) // most).clamp_min(1)
    number = torch.arange(max(1, -(-width // most)), device=num_tiles.device)
    block = torch.arange(most, device=num_tiles.device)
    turn = ((block * block * _GOLDEN & 0xFFFF) * own[:, None]) >> 16
    turn = torch.where((block + 1) * own[:, None] <= count[:, None], turn, 0)
    offset = (number[:, None] - turn[:, None]) % own[:, None, None]
    places = begin[:, None, None] + block * own[:, None, None] + offset
    here = (number < own[:, None])[:, :, None] & (places < end[:, None, None])
    needed = (kept - (num_tiles - count))[:, None]
    takes = needed // own[:, None] + (number < needed % own[:, None])
    takes = torch.where(number < own[:, None], takes, 0).to(torch.int32)
    return Strata(torch.where(here, places, width).long(), takes, begin, end)
