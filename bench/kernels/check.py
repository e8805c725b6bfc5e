"""A benchmark of wrong answers is worth nothing: every contestant is checked before it is timed.

The batch is small and awkward (single tokens, page edges, ragged lengths); the truth is the
project's float32 reference on the K and V that the contestant itself reads.
"""

from __future__ import annotations

import torch

from bench.kernels.arena import Arena, LatentBatch, PagedBatch
from bench.kernels.impls import Contestant, Prepared, Unsupported
from bench.kernels.shapes import HEAD_DIM, Heads
from bicl.attention import reference
from bicl.attention.mla import LATENT_DIM

__all__ = ["TOLERANCE", "decode_error", "mla_error", "prefill_error", "relative_error"]

TOLERANCE = 1e-2
"""Largest relative error (Frobenius) taken for correct; bf16 outputs round at about 2e-3."""

_RAGGED = ((1, 1), (1, 17), (1, 64), (1, 65), (1, 777), (1, 2049))
_EVEN = ((1, 1024),) * 3
_CHUNKS = ((1, 1), (7, 64), (100, 160), (129, 129), (33, 513))
_EVEN_CHUNKS = ((128, 128),) * 2


def relative_error(result: torch.Tensor, truth: torch.Tensor) -> float:
    """``|result - truth| / |truth|``, Frobenius norms; infinite where the result is not finite."""
    if not bool(torch.isfinite(result).all()):
        return float("inf")
    return float((result - truth).norm() / truth.norm())


def decode_error(contestant: Contestant, arena: Arena, heads: Heads) -> float:
    """Relative error of a decode step over ragged lengths (even ones where it needs that)."""
    return _error(contestant, arena, heads, _RAGGED, _EVEN)


def prefill_error(contestant: Contestant, arena: Arena, heads: Heads) -> float:
    """The same for chunks of several queries with and without a cached prefix."""
    return _error(contestant, arena, heads, _CHUNKS, _EVEN_CHUNKS)


def mla_error(contestant: Contestant, arena: Arena, heads: Heads) -> float:
    """The same for a decode step over latents."""
    lengths = tuple(total for _, total in _RAGGED)
    batch = LatentBatch(arena, heads, lengths, (1,) * len(lengths), rotations=2)
    prepared = contestant.prepare(batch)
    prepared.settle()
    result = prepared.packed(prepared.calls[0]()).float().cpu()
    return relative_error(result, _truth(batch, prepared, LATENT_DIM**-0.5))


def _error(
    contestant: Contestant,
    arena: Arena,
    heads: Heads,
    ragged: tuple[tuple[int, int], ...],
    even: tuple[tuple[int, int], ...],
) -> float:
    try:
        batch, prepared = _prepare(contestant, arena, heads, ragged)
    except Unsupported:
        batch, prepared = _prepare(contestant, arena, heads, even)
    prepared.settle()
    result = prepared.packed(prepared.calls[0]()).float().cpu()
    return relative_error(result, _truth(batch, prepared, HEAD_DIM**-0.5))


def _prepare(
    contestant: Contestant,
    arena: Arena,
    heads: Heads,
    sequences: tuple[tuple[int, int], ...],
) -> tuple[PagedBatch, Prepared]:
    new, total = zip(*sequences, strict=True)
    batch = PagedBatch(arena, heads, total, new, rotations=2)
    return batch, contestant.prepare(batch)


def _truth(batch: PagedBatch, prepared: Prepared, scale: float) -> torch.Tensor:
    bounds = batch.cu_seqlens_q.tolist()
    query = batch.query.float().cpu()
    parts = []
    for index in range(len(batch.lengths)):
        key, value = (part.float().cpu() for part in prepared.key_value(index))
        rows = query[bounds[index] : bounds[index + 1]]
        out, _ = reference.attention(rows, key, value, scale=scale, causal=True)
        parts.append(out)
    return torch.cat(parts)
