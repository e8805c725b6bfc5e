"""FlashMLA's dense decode, over its own token-major pages of 64.

Its metadata is made by the first call and kept, as FlashMLA asks of a model's layers; it counts
nothing here.
"""

from __future__ import annotations

from functools import partial

import torch

from bench.kernels.arena import PagedBatch
from bench.kernels.impls import Contestant, Prepared, Registry
from bicl.attention.mla import LATENT_DIM, VALUE_DIM

NAME = "flashmla"
_PAGE = 64


def register(registry: Registry) -> None:
    import flash_mla

    registry.versions[NAME] = flash_mla.__version__
    registry.mla.append(Contestant("flashmla-p64", _decode))


def _decode(batch: PagedBatch) -> Prepared:
    import flash_mla

    num_pages = batch.num_pages(_PAGE)
    count = num_pages * _PAGE * LATENT_DIM
    pages = batch.arena.flat[:count].view(num_pages, _PAGE, 1, LATENT_DIM)
    tables = batch.page_tables(_PAGE)
    metadata, _ = flash_mla.get_mla_metadata()

    def call(table: torch.Tensor) -> torch.Tensor:
        out, _ = flash_mla.flash_mla_with_kvcache(
            *(batch.query[:, None], pages, table, batch.cache_seqlens, VALUE_DIM, metadata),
            softmax_scale=LATENT_DIM**-0.5,
        )
        return out[:, 0]

    def latents(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = tables[0][index, : batch.pages(_PAGE)[index]].long()
        rows = pages[ids].flatten(0, 1)[: batch.lengths[index]]
        return rows, rows[..., :VALUE_DIM]

    calls = [partial(call, table) for table in tables]
    calls[0]()
    return Prepared(calls, latents, metadata)
