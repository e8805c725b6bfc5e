"""Decode steps over latent pages, and the truth about them in plain torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bicl.attention.mla import LATENT_DIM, VALUE_DIM, LatentAttention, latent_layout
from bicl.attention.pool import KVPool, LayerCache


@dataclass(frozen=True)
class LatentStep:
    """One query a sequence over pages that ``LatentAttention.store`` has filled.

    Slots that no sequence owns are NaN; table entries past a sequence's end are absurd.
    """

    layer: LayerCache
    query: torch.Tensor  # [B, heads, 576]
    page_table: torch.Tensor
    cache_seqlens: torch.Tensor
    latents: list[torch.Tensor]  # [length, 576] of each sequence

    @property
    def lengths(self) -> list[int]:
        return [len(rows) for rows in self.latents]


def latent_step(
    attention: LatentAttention,
    lengths: Sequence[int],
    dtype: torch.dtype,
    *,
    heads: int = 16,
    columns: int | None = None,
    latents: list[torch.Tensor] | None = None,
    swizzle: bool = True,
) -> LatentStep:
    """Permuted pages, ``columns`` a sequence (by default as many as the longest needs)."""
    device, layout = attention.device, latent_layout(dtype, swizzle=swizzle)
    columns = columns or max(1, max(map(layout.pages_for, lengths), default=1))
    batch = len(lengths)
    layer = KVPool([layout], batch * columns + 3, device, fill=math.nan).layers[0]
    order = torch.randperm(layer.num_pages)[: batch * columns].view(batch, columns)
    table = order.clone()
    latents = latents or [torch.randn(n, LATENT_DIM).to(dtype).to(device) for n in lengths]
    for sequence, rows in enumerate(latents):
        token = torch.arange(len(rows))
        slots = order[sequence, token // 64] * 64 + token % 64
        attention.store(layer, rows, slots.to(device))
        table[sequence, layout.pages_for(len(rows)) :] = 2**31 - 1 - sequence
    return LatentStep(
        layer,
        torch.randn(batch, heads, LATENT_DIM).to(dtype).to(device),
        table.int().to(device),
        torch.tensor([len(rows) for rows in latents], dtype=torch.int32, device=device),
        latents,
    )


def truth_of(step: LatentStep, scale: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output and LSE in float32 by the definition, and the output by the query's own dtype."""
    batch, heads, _ = step.query.shape
    device = step.query.device
    out = torch.zeros(batch, heads, VALUE_DIM, device=device)
    lse = torch.full((heads, batch), -math.inf, device=device)
    same = torch.zeros(batch, heads, VALUE_DIM, dtype=step.query.dtype, device=device)
    for i, rows in enumerate(step.latents):
        if not len(rows):
            continue
        scores = step.query[i].float() @ rows.float().T * scale
        lse[:, i] = torch.logsumexp(scores, dim=-1)
        out[i] = torch.softmax(scores, dim=-1) @ rows[:, :VALUE_DIM].float()
        rounded = step.query[i] @ rows.T * scale
        same[i] = torch.softmax(rounded, dim=-1) @ rows[:, :VALUE_DIM]
    return out, lse, same
