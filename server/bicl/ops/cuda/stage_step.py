"""A decode step's inputs at the addresses that a captured graph reads."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bicl.ops.cuda import library

__all__ = ["bind_stage_step"]


def bind_stage_step(
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    input_lengths: torch.Tensor,
    cache_lengths: torch.Tensor,
    page_table: torch.Tensor,
) -> Callable[..., None]:
    """A function that copies a step into these tensors in one launch.

    Its arguments, of at most as many sequences: ``input_ids, positions, slots, slot_places,
    input_lengths, cache_lengths, page_table``. ``slots`` may be longer: sequence i's is
    ``slots[slot_places[i]]`` (int64 ``[batch]``). Rows past the batch get length 0 and slot 0;
    their ids, positions and pages stay as they were, and so do columns past the step's own.

    Args:
        input_ids, slots: int64 ``[rows]``; ``positions``, ``input_lengths``, ``cache_lengths``:
            int32 ``[rows]``; all contiguous. They must outlive the function.
        page_table: int32 ``[rows, max_pages]``.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, here and in the function.
    """
    bound: Callable[..., None] = library.module().bind_stage_step(
        input_ids, positions, slots, input_lengths, cache_lengths, page_table
    )
    return bound
