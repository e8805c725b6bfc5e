"""New keys and values at the end of cached sequences, wherever the cache keeps them.

Every cache is addressed alike: token ``p`` of sequence ``b`` has the number
``table[b, p // size] * size + p % size``. For our pages that is the slot; for token-major pages,
and for a padded batch (one page as long as the cache a sequence), the row of the flattened tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bicl.attention.virtual_device.rotary import apply_rotary
from bicl.errors import InvalidInputError

__all__ = ["Places", "Rotary", "write_token_major"]


@dataclass(frozen=True)
class Places:
    """Where the tokens of ``B`` sequences lie.

    Attributes:
        table: int32 ``[B, columns]``.
        size: tokens a column.
    """

    table: torch.Tensor
    size: int

    @property
    def capacity(self) -> int:
        """Tokens that a sequence can have."""
        return self.table.shape[1] * self.size

    def numbers(self, sequence: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """int64 numbers of tokens; -1 past the capacity.

        Args:
            sequence, position: int64, broadcast together.
        """
        column = torch.div(position, self.size, rounding_mode="floor")
        page = self.table[sequence, column.clamp(0, self.table.shape[1] - 1)].long()
        number = page * self.size + position % self.size
        return torch.where(position < self.capacity, number, -1)

    def check(
        self, lengths: torch.Tensor, num_pages: int, leftpad: torch.Tensor | None = None
    ) -> None:
        """Refuse lengths above the capacity and page ids outside the cache that are in use.

        Only where that needs no wait for a device.
        """
        if lengths.device.type != "cpu" or not lengths.numel():
            return
        longest = int(lengths.max())
        if longest > self.capacity:
            raise InvalidInputError(
                f"a sequence would have {longest} tokens, but the cache holds {self.capacity} "
                f"({self.table.shape[1]} x {self.size}); give it more pages or rows"
            )
        if int(lengths.min()) < 0:
            raise InvalidInputError(f"cache_seqlens must not be negative, got {lengths.tolist()}")
        first_token = torch.arange(self.table.shape[1]) * self.size
        used = first_token < lengths[:, None]
        if leftpad is not None:
            used &= first_token + self.size > leftpad[:, None]
        wrong = used & ((self.table < 0) | (self.table >= num_pages))
        if bool(wrong.any()):
            row, column = wrong.nonzero()[0].tolist()
            raise InvalidInputError(
                f"page_table[{row}, {column}] is {int(self.table[row, column])}, but the cache has "
                f"pages 0..{num_pages - 1}; the sequence has {int(lengths[row])} tokens, so this "
                "entry is in use"
            )


@dataclass(frozen=True)
class Rotary:
    """Rotary tables ``[max_position, rotary_dim / 2]`` and each sequence's first position."""

    cos: torch.Tensor
    sin: torch.Tensor
    first: torch.Tensor
    interleaved: bool

    def turn(self, rows: torch.Tensor, sequence: torch.Tensor, nth: torch.Tensor) -> torch.Tensor:
        """Rotate row ``nth`` of each sequence at its position."""
        position = self.first.long()[sequence] + nth
        if position.device.type == "cpu" and position.numel():
            last = int(position.max())
            if last >= self.cos.shape[0]:
                raise InvalidInputError(
                    f"rotary_cos has {self.cos.shape[0]} rows, but position {last} is rotated"
                )
        return apply_rotary(rows, position, self.cos, self.sin, interleaved=self.interleaved)


def write_token_major(cache: torch.Tensor, rows: torch.Tensor, numbers: torch.Tensor) -> None:
    """Write rows ``[n, H, d]`` into ``[first, second, H, d]``; number -1 writes nothing."""
    if cache.element_size() == 1:
        cache, rows = cache.view(torch.uint8), rows.view(torch.uint8)
    number = numbers.clamp(min=0)
    place = (torch.div(number, cache.shape[1], rounding_mode="floor"), number % cache.shape[1])
    cache[place] = torch.where((numbers >= 0)[:, None, None], rows, cache[place])
