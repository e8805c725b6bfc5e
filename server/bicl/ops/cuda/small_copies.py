"""Small copies between the host and the device that do not queue behind large ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from bicl.ops.cuda import library

__all__ = ["small_copies"]


def small_copies(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], device: torch.device) -> None:
    """Copies by one kernel on the device's current stream, which reads and writes page-locked
    memory itself: a copy engine does one copy after the other.

    Both ends must live until it ran; torch does not know that it uses them.

    Args:
        pairs: source and target, contiguous, equally many bytes; one of them in page-locked host
            memory, the other on the device. 16 at most.
        device: that device.
    """
    pieces = [(source.data_ptr(), target.data_ptr(), source.nbytes) for source, target in pairs]
    library.module().small_copies(
        torch.from_numpy(np.array(pieces, dtype=np.int64).reshape(-1, 3)),
        device.index,
        torch.cuda.current_stream(device).cuda_stream,
    )
