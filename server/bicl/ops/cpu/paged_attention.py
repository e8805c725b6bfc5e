"""``paged_attention``: one packed step of prefill, extend and decode rows over pages."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from bicl.cache.layout import PageLayout
from bicl.ops.cpu.dense import Partial, attend_sequence
from bicl.ops.cpu.gather import PageLoader
from bicl.ops.cpu.schedule import Sequence, StepSchedule

__all__ = ["AttentionOptions", "paged_attention"]


@dataclass(slots=True)
class AttentionOptions:
    """What one call asks for; ``left`` and ``right`` are -1 where unlimited."""

    scale: float
    left: int = -1
    right: int = -1
    softcap: float = 0.0
    k_scale: float = 1.0
    v_scale: float = 1.0


def paged_attention(
    query: torch.Tensor,
    pages: torch.Tensor,
    layout: PageLayout,
    schedule: StepSchedule,
    options: AttentionOptions,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of ``query`` ``[T, num_q_heads, head_dim]`` over the pages of one layer.

    Args:
        out: like ``query``; mutated and returned. None: new memory.

    Returns:
        ``out`` and, on request, the LSE, float32 ``[num_q_heads, T]``. Rows that see no key, or
        belong to no sequence, are exactly 0 and -inf.
    """
    rows, heads = query.shape[0], query.shape[1]
    only_decode = schedule.decode_rows is None and len(schedule.decode) == rows > 0
    if only_decode and out is None and not return_lse:
        values, _ = _decode(query, pages, layout, schedule, options)
        return values.reshape(query.shape).to(query.dtype), None
    out = torch.empty(query.shape, dtype=query.dtype) if out is None else out
    lse = torch.empty(heads, rows) if return_lse else None
    if schedule.leaves_rows(rows, options.right):
        out.zero_()
        if lse is not None:
            lse.fill_(-math.inf)
    if schedule.decode:
        part = _decode(query, pages, layout, schedule, options)
        _write_decode(part, schedule, out, lse)
    for sequence in schedule.prefill:
        _prefill(query, pages, layout, schedule, sequence, options, out, lse)
    return out, lse


def _compute_dtype(query: torch.Tensor, layout: PageLayout) -> torch.dtype:
    """fp8 pages are widened to the query's dtype, which holds every fp8 value exactly."""
    if layout.element_bytes == 1:
        return query.dtype
    return torch.promote_types(query.dtype, layout.dtype)


def _decode(
    query: torch.Tensor,
    pages: torch.Tensor,
    layout: PageLayout,
    schedule: StepSchedule,
    options: AttentionOptions,
) -> Partial:
    """All decode rows in one computation: ``[rows, H, group, d]`` and LSE ``[rows, H, group]``."""
    batch = schedule.decode_batch(layout, options.left, _compute_dtype(query, layout))
    rows = schedule.decode_rows
    if rows is not None:
        query = query.index_select(0, rows)
    elif query.shape[0] > schedule.num_rows:
        query = query[: schedule.num_rows]
    part = batch.run(query, pages, scale=options.scale * options.k_scale, softcap=options.softcap)
    return part if options.v_scale == 1.0 else (part[0] * options.v_scale, part[1])


def _write_decode(
    part: Partial, schedule: StepSchedule, out: torch.Tensor, lse: torch.Tensor | None
) -> None:
    """Results of the decode rows to their rows of ``out`` and columns of ``lse``."""
    values = part[0].reshape(-1, *out.shape[1:]).to(out.dtype)
    sums = part[1].reshape(values.shape[0], -1).t()
    rows = schedule.decode_rows
    if rows is None:
        out[: schedule.num_rows].copy_(values)
    else:
        out.index_copy_(0, rows, values)
    if lse is None:
        return
    if rows is None:
        lse[:, : schedule.num_rows].copy_(sums)
    else:
        lse.index_copy_(1, rows, sums)


def _prefill(
    query: torch.Tensor,
    pages: torch.Tensor,
    layout: PageLayout,
    schedule: StepSchedule,
    sequence: Sequence,
    options: AttentionOptions,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    # Row i sees keys up to i + keys - rows + right, so the first rows may see none.
    blind = max(0, sequence.rows - sequence.keys - options.right) if options.right >= 0 else 0
    rows = slice(sequence.first_row + min(blind, sequence.rows), sequence.first_row + sequence.rows)
    if rows.start == rows.stop:
        return
    dtype = _compute_dtype(query, layout)
    wanted = schedule.prefill_pages(layout, sequence, options.left)
    loader = PageLoader(layout, wanted.index, 1, dtype, schedule.scratch)
    loader.load(pages)
    seen = loader.rows[0, :, :, wanted.begin : wanted.end, : layout.head_dim]
    grouped = query[rows].to(dtype).view(-1, layout.num_kv_heads, *_group(query, layout))
    part_out, part_lse = attend_sequence(
        grouped.permute(1, 2, 0, 3),
        seen[:, 0],
        seen[:, 1],
        num_keys=sequence.keys,
        left=options.left,
        right=options.right,
        scale=options.scale * options.k_scale,
        softcap=options.softcap,
    )
    if options.v_scale != 1.0:
        part_out = part_out * options.v_scale
    out[rows].view(grouped.shape).copy_(part_out.permute(2, 0, 1, 3))
    if lse is not None:
        lse[:, rows].view(*grouped.shape[1:3], -1).copy_(part_lse)


def _group(query: torch.Tensor, layout: PageLayout) -> tuple[int, int]:
    return query.shape[1] // layout.num_kv_heads, layout.head_dim
