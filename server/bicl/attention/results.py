"""A step's results on their way to the host."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from bicl.ops.cuda.small_copies import small_copies

__all__ = ["ResultCopies", "ResultCopy"]

ALIGNMENT = 16
LEAST_BYTES = 1 << 12


class ResultCopies:
    """Copies of small tensors to the host, which a kernel makes: on the copy engine they would
    wait for all pages that are on their way to host memory, for milliseconds.

    For one thread and one stream. On the CPU nothing moves.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._idle: deque[_Slot] = deque()
        self._lent: set[_Slot] = set()  # the device may still write there

    def begin(self, *tensors: torch.Tensor) -> ResultCopy:
        """Copy tensors as they are when the current stream comes to it. Waits for nothing."""
        if self._device.type == "cpu":
            return ResultCopy(list(tensors), None, self)
        sources = [tensor.contiguous() for tensor in tensors]
        spans, end = [], 0
        for source in sources:
            start = -(-end // ALIGNMENT) * ALIGNMENT
            end = start + source.nbytes
            spans.append(slice(start, end))
        slot = self._take(end)
        targets = [
            slot.memory[span].view(source.dtype).view(source.shape)
            for span, source in zip(spans, sources, strict=True)
        ]
        device = sources[0].device
        small_copies(list(zip(sources, targets, strict=True)), device)
        slot.filled.record(torch.cuda.current_stream(device))
        self._lent.add(slot)
        return ResultCopy(targets, slot, self)

    def _take(self, num_bytes: int) -> _Slot:
        while self._idle:
            slot = self._idle.popleft()
            if slot.memory.nbytes >= num_bytes:
                return slot
        return _Slot(max(LEAST_BYTES, 1 << (num_bytes - 1).bit_length()))

    def _give_back(self, slot: _Slot) -> None:
        self._lent.discard(slot)
        self._idle.append(slot)


class ResultCopy:
    """Tensors on their way to the host."""

    def __init__(
        self, tensors: list[torch.Tensor], slot: _Slot | None, copies: ResultCopies
    ) -> None:
        self._tensors = tensors
        self._slot = slot
        self._copies = copies

    def lists(self) -> list[list[Any]]:
        """Wait for them; each as a list. Call it once."""
        if self._slot is not None:
            self._slot.filled.synchronize()
        lists = [tensor.tolist() for tensor in self._tensors]
        if self._slot is not None:
            self._copies._give_back(self._slot)
        return lists


class _Slot:
    """Page-locked memory, and the event behind what fills it."""

    __slots__ = ("filled", "memory")

    def __init__(self, num_bytes: int) -> None:
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        self.filled = torch.cuda.Event()  # type: ignore[no-untyped-call]
