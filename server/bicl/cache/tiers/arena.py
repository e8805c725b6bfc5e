"""Host memory for pages: one slot holds one page of all layers, back to back."""

from __future__ import annotations

import numpy as np
import torch

from bicl.errors import ConfigError

__all__ = ["HostArena"]

SEGMENT_BYTES = 1 << 30


class HostArena:
    """Slots of equal size, in large pieces of memory.

    Page-locked pieces are powers of two, because torch's allocator rounds up to them.

    Args:
        slot_bytes: bytes of one page in all layers.
        max_bytes: memory to take, at most.
        pinned: page-locked, so that a GPU can copy from and to it on its own.

    Raises:
        ConfigError: not even one slot fits, or the memory cannot be had.
    """

    def __init__(self, slot_bytes: int, max_bytes: int, *, pinned: bool = False) -> None:
        self.slot_bytes = slot_bytes
        self.pinned = pinned
        self._segments: list[torch.Tensor] = []
        self._slots: list[tuple[int, int]] = []  # segment, offset in it
        rest = max_bytes
        while (size := self._piece_bytes(rest)) >= slot_bytes:
            self._add_segment(size)
            rest -= size
        if not self._slots:
            least = _power_of_two_from(slot_bytes) if pinned else slot_bytes
            raise ConfigError(
                f"the host tier has {max_bytes} bytes, but one page of all layers needs "
                f"{slot_bytes}; give it at least {least}"
            )
        self.addresses = np.array(
            [self._segments[s].data_ptr() + offset for s, offset in self._slots], dtype=np.int64
        )

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    def slot(self, number: int) -> torch.Tensor:
        """A slot's bytes, uint8 ``[slot_bytes]``."""
        segment, offset = self._slots[number]
        return self._segments[segment][offset : offset + self.slot_bytes]

    def bytes_of(self, number: int) -> memoryview:
        """A slot's bytes, for reading from and writing to files."""
        return memoryview(self.slot(number).numpy())  # type: ignore[arg-type]

    def _piece_bytes(self, rest: int) -> int:
        """Size of the next piece, of ``rest`` bytes left; less than a slot if none fits."""
        if not self.pinned:
            return (
                min(rest, max(SEGMENT_BYTES, self.slot_bytes)) // self.slot_bytes * self.slot_bytes
            )
        largest = max(SEGMENT_BYTES, _power_of_two_from(self.slot_bytes))
        return min(largest, _power_of_two_to(rest)) if rest else 0

    def _add_segment(self, size: int) -> None:
        try:
            segment = torch.empty(size, dtype=torch.uint8, pin_memory=self.pinned)
        except RuntimeError as error:
            taken = sum(segment.numel() for segment in self._segments)
            raise ConfigError(
                f"the host tier got {taken} bytes, but no {size} more: {error}. "
                "Give it less memory, or raise the limit of locked memory (ulimit -l)"
            ) from error
        number = len(self._segments)
        self._segments.append(segment)
        self._slots += [(number, i * self.slot_bytes) for i in range(size // self.slot_bytes)]


def _power_of_two_to(value: int) -> int:
    return 1 << (value.bit_length() - 1)


def _power_of_two_from(value: int) -> int:
    return 1 << (value - 1).bit_length()
