"""``paged_attention``: one packed step of prefill, extend and decode rows over pages."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from bicl.cache.layout import PageLayout
from bicl.ops.cpu.dense import Partial, attend, attend_sequence
from bicl.ops.cpu.gather import load_pages
from bicl.ops.cpu.schedule import Sequence, StepSchedule

__all__ = ["AttentionOptions", "paged_attention"]


@dataclass(frozen=True)
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
    chunks = schedule.decode_chunks(layout, options.left)
    dtype = _compute_dtype(query, layout)
    loaded = load_pages(pages, layout, chunks.index, chunks.count, dtype)
    if chunks.unused is not None:
        # Slots that nobody wrote may hold NaN, and 0 x NaN is NaN.
        loaded.view(-1, layout.padded_head_dim).index_fill_(0, chunks.unused, 0.0)
    if chunks.span is not None:
        loaded = loaded[..., chunks.span[0] : chunks.span[1], :]
    loaded = loaded[..., : layout.head_dim]

    rows = schedule.decode_rows
    picked = query[: schedule.num_rows] if rows is None else query.index_select(0, rows)
    grouped = picked.to(dtype).view(picked.shape[0], layout.num_kv_heads, -1, layout.head_dim)
    if chunks.row_of_chunk is not None:
        grouped = grouped.index_select(0, chunks.row_of_chunk)
    part = attend(
        grouped,
        loaded[:, :, 0],
        loaded[:, :, 1],
        scale=options.scale * options.k_scale,
        softcap=options.softcap,
        mask=chunks.mask,
    )
    if chunks.row_of_chunk is not None:
        part = _combine(part, chunks.row_of_chunk, picked.shape[0])
    return part if options.v_scale == 1.0 else (part[0] * options.v_scale, part[1])


def _combine(part: Partial, row_of_chunk: torch.Tensor, num_rows: int) -> Partial:
    """Merge the chunks of each row by their LSE."""
    out, lse = part
    top = lse.new_full((num_rows, *lse.shape[1:]), -math.inf)
    top.scatter_reduce_(0, row_of_chunk[:, None, None].expand_as(lse), lse, "amax")
    weight = (lse - top.index_select(0, row_of_chunk)).exp_()
    total = torch.zeros_like(top).index_add_(0, row_of_chunk, weight)
    weighted = out.float() * weight[..., None]
    merged = weighted.new_zeros((num_rows, *out.shape[1:])).index_add_(0, row_of_chunk, weighted)
    return merged / total[..., None], top + total.log()


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
    loaded = load_pages(pages, layout, wanted.index, 1, dtype)[0]
    loaded = loaded[:, :, wanted.begin : wanted.end, : layout.head_dim]
    grouped = query[rows].to(dtype).view(-1, layout.num_kv_heads, *_group(query, layout))
    part_out, part_lse = attend_sequence(
        grouped.permute(1, 2, 0, 3),
        loaded[:, 0],
        loaded[:, 1],
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
