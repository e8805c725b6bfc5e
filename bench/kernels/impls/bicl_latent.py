"""Our decode attention over latent pages, by the class that a model calls.

``-pdl`` lets a launch overlap the end of the kernel before it, as is the class's default.
"""

from __future__ import annotations

from functools import cache, partial

import torch

from bench.kernels.arena import PagedBatch
from bench.kernels.impls import Contestant, Prepared, Registry
from bicl.attention.mla import LATENT_DIM, VALUE_DIM, LatentAttention, latent_layout
from bicl.attention.pool import LayerCache
from bicl.errors import BackendError
from bicl.ops.cuda import library

__all__ = ["NAME", "latents", "register"]

NAME = "bicl-latent"
_PAGE = 64


def register(registry: Registry) -> None:
    try:
        library.module()
    except BackendError as error:
        raise ImportError(str(error)) from error
    registry.mla += [
        Contestant("bicl", partial(_decode, False), ours=True),
        Contestant("bicl-pdl", partial(_decode, True), ours=True),
    ]


@cache
def _attention(device: torch.device, pdl: bool) -> LatentAttention:
    return LatentAttention(device, max_batch=256, num_heads=128, pdl=pdl)


def _decode(pdl: bool, batch: PagedBatch) -> Prepared:
    attention = _attention(batch.arena.device, pdl)
    layer = batch.arena.tiles(latent_layout(torch.bfloat16), batch.num_pages(_PAGE))
    tables = batch.page_tables(_PAGE)
    out = torch.empty_like(batch.query[..., :VALUE_DIM])
    calls = [
        partial(
            attention.decode,
            *(batch.query, layer, table, batch.cache_seqlens),
            scale=LATENT_DIM**-0.5,
            out=out,
        )
        for table in tables
    ]
    return Prepared(calls, partial(latents, layer, tables[0], batch.lengths), attention)


def latents(
    layer: LayerCache, table: torch.Tensor, lengths: tuple[int, ...], index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys ``[length, 1, 576]`` and values ``[length, 1, 512]`` of a sequence, by the layout's own
    formula."""
    layout = layer.layout
    ids = table[index, : layout.pages_for(lengths[index])].long()
    offsets = torch.from_numpy(layout.plane_offsets.copy()).to(ids.device)
    rows = layer.pages[ids].flatten(1)[:, offsets.flatten()].view(-1, 1, LATENT_DIM)
    rows = rows[: lengths[index]]
    return rows, rows[..., :VALUE_DIM]
