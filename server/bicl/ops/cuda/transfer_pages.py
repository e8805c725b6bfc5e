"""Copies between device memory and page-locked host memory."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from bicl.ops.cuda import library

__all__ = ["transfer_pages"]


def transfer_pages(
    sources: npt.NDArray[np.int64],
    targets: npt.NDArray[np.int64],
    num_bytes: npt.NDArray[np.int64],
    stream: torch.cuda.Stream,
) -> None:
    """Issues one copy a piece to the copy engines, all in one call of the driver.

    Args:
        sources, targets: int64 ``[n]``, addresses; one side on the stream's device, the other in
            page-locked host memory.
        num_bytes: int64 ``[n]``.
        stream: not the default one.
    """
    library.module().transfer_pages(
        torch.from_numpy(sources),
        torch.from_numpy(targets),
        torch.from_numpy(num_bytes),
        stream.device_index,
        stream.cuda_stream,
    )
