"""Latent pages (MLA) in plain torch: twins of ``csrc/store_latent`` and ``csrc/mla_decode``."""

from __future__ import annotations

import math

import torch

from bicl.cache.layout import PageLayout

__all__ = ["latent_rows", "mla_decode", "store_latent"]


def _places(layout: PageLayout, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indexes into pages viewed as ``[num_pages, -1]``, one row a slot."""
    offsets = torch.from_numpy(layout.plane_offsets[:, : layout.head_dim].copy())
    return (slots // layout.page_size)[:, None], offsets[slots % layout.page_size]


def store_latent(
    pages: torch.Tensor, layout: PageLayout, latent: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write ``latent`` ``[T, head_dim]`` at ``slots`` (int64 ``[T]``, negative: skip)."""
    kept = slots >= 0
    flat = pages.view(len(pages), -1)
    flat[_places(layout, slots[kept])] = latent[kept].to(layout.dtype)


def latent_rows(pages: torch.Tensor, layout: PageLayout, slots: torch.Tensor) -> torch.Tensor:
    """The latents at ``slots`` (int64 ``[T]``, none negative), ``[T, head_dim]`` as stored."""
    return pages.view(len(pages), -1)[_places(layout, slots)]


def mla_decode(
    query: torch.Tensor,
    pages: torch.Tensor,
    layout: PageLayout,
    page_table: torch.Tensor,
    lengths: list[int],
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Fill ``out`` ``[B, heads, value dims]`` and ``lse`` float32 ``[heads, B]``, if it is wanted.

    Args:
        query: ``[B, heads, head_dim]``; its first ``out.shape[2]`` dims meet those that are values.
        page_table: int32 ``[B, max_pages]``; only entries that a length reaches are read.
    """
    size = layout.page_size
    for sequence, length in enumerate(lengths):
        if length == 0:
            out[sequence] = 0
            if lse is not None:
                lse[:, sequence] = -math.inf
            continue
        token = torch.arange(length)
        slots = page_table[sequence, token // size].long() * size + token % size
        latent = latent_rows(pages, layout, slots).float()
        scores = query[sequence].float() @ latent.T * scale
        if lse is not None:
            lse[:, sequence] = torch.logsumexp(scores, dim=-1)
        out[sequence] = torch.softmax(scores, dim=-1) @ latent[:, : out.shape[2]]
