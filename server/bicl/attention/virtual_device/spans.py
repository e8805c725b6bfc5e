"""Sequences cut into spans: query rows, and the stretch of keys that they may look at.

``attention_chunk`` and unused query rows need no kernel of their own. A sequence whose attention
is confined to chunks is one sequence a chunk; rows that see nothing form a sequence with no keys,
whose rows are exactly zero. Device arithmetic only, so that nothing waits for a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Spans", "cut_spans"]


@dataclass(frozen=True)
class Spans:
    """Spans of all sequences in row order, ``S`` of each of ``B`` sequences.

    Attributes:
        cu_seqlens_q: int32 ``[B * S + 1]``.
        keys: int32 ``[B * S]``, keys of each span.
        chunk: int64 ``[S]``, chunk number of each span; -1 for spans without keys.
    """

    cu_seqlens_q: torch.Tensor
    keys: torch.Tensor
    chunk: torch.Tensor


def cut_spans(
    starts: torch.Tensor,
    used_q: torch.Tensor | None,
    keys: torch.Tensor,
    chunk_tokens: int,
    max_keys: int,
) -> Spans:
    """Cut every sequence into the spans that a backend can run.

    Query ``i`` of ``q`` sits at position ``i + keys - q`` and sees the chunk that holds it.

    Args:
        starts: int32 ``[B + 1]``, first row of each sequence.
        used_q: int32 ``[B]``, rows that count; None: all.
        keys: int32 ``[B]``.
        chunk_tokens: 0 for no chunks.
        max_keys: host bound of ``keys``.
    """
    device = starts.device
    begin = starts[:-1].long()
    rows = starts.long().diff() if used_q is None else used_q.long()
    bounds, lengths, chunk = [begin], [], []
    if chunk_tokens > 0:
        count = max(1, -(-max_keys // chunk_tokens))
        offset = keys.long() - rows
        # Rows before position 0 come first: they see no chunk.
        for number in range(-1, count):
            if number >= 0:
                lengths.append((keys - number * chunk_tokens).clamp(0, chunk_tokens))
            else:
                lengths.append(torch.zeros_like(keys))
            chunk.append(number)
            last = (number + 1) * chunk_tokens - offset
            bounds.append(begin + torch.minimum(last.clamp(min=0), rows))
    else:
        lengths.append(keys)
        chunk.append(0)
        bounds.append(begin + rows)
    if used_q is not None:
        lengths.append(torch.zeros_like(keys))
        chunk.append(-1)
        bounds.append(starts[1:].long())
    cu = torch.cat([torch.stack(bounds[:-1], dim=1).view(-1), starts[-1:].long()])
    return Spans(
        cu.to(torch.int32),
        torch.stack(lengths, dim=1).view(-1).to(torch.int32),
        torch.tensor(chunk, device=device),
    )
