"""Needles in a long context, over KV heads that lie on one rank or are dealt out to several."""

from __future__ import annotations

from functools import cache

import torch

from bicl.attention.backend import AttentionBackend
from bicl.attention.metadata import AttentionMetadata
from bicl.attention.pool import KVPool
from bicl.cache.layout import PageLayout

TOKENS, KV_HEADS, GROUP, DIM = 32768, 4, 4, 64
NEEDLES = (TOKENS // 10, TOKENS // 2, TOKENS * 9 // 10)


def outputs_by_shards(
    backend: AttentionBackend, stored: torch.dtype, shards: int, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Three decode rows over the same tokens, each in search of one needle.

    Returns:
        Outputs of all ranks side by side, ``[3, KV_HEADS * GROUP, DIM]``, and the needles' values,
        each query head's KV head's, of the same shape.
    """
    query, key, value, pages = _haystack()
    token = torch.arange(TOKENS)
    slots = (pages[token // 64] * 64 + token % 64).to(device)
    meta = AttentionMetadata(
        pages.to(device, torch.int32).repeat(3, 1),
        torch.full((3,), TOKENS, dtype=torch.int32, device=device),
        torch.arange(4, dtype=torch.int32, device=device),
        slots[-3:],
        1,
        TOKENS,
    )
    backend.plan(meta)
    answers, own = [], KV_HEADS // shards
    for first in range(0, KV_HEADS, own):
        heads = slice(first, first + own)
        layout = PageLayout(own, DIM, stored, swizzle=str(device) != "cpu")
        [layer] = KVPool([layout], len(pages), device).layers
        rows = [x[:, heads].to(device).contiguous() for x in (key, value)]
        backend.store(layer, *rows, slots)
        asked = query[:, heads].flatten(1, 2).to(device)
        out = backend.run(asked, layer, meta, scale=DIM**-0.5)
        assert isinstance(out, torch.Tensor)
        answers.append(out.float().cpu())
    needles = value[list(NEEDLES)].float().repeat_interleave(GROUP, dim=1)
    return torch.cat(answers, dim=1), needles


@cache
def _haystack() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(50)
    key, value = torch.randn(2, TOKENS, KV_HEADS, DIM, generator=generator).bfloat16()
    query = torch.randn(3, KV_HEADS, GROUP, DIM, generator=generator).bfloat16()
    key[list(NEEDLES)] = 12 * query.mean(dim=2)
    return query, key, value, torch.randperm(TOKENS // 64, generator=generator)


def found(out: torch.Tensor, needles: torch.Tensor) -> torch.Tensor:
    """Which heads of which row look at its needle: bool ``[3, heads]``."""
    return torch.cosine_similarity(out, needles, dim=-1) > 0.9
