"""torch SDPA through cuDNN on contiguous KV: no page table, so no candidate for a server's cache.

It shows what the card gives when nothing has to be looked up.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.kernels.arena import PagedBatch
from bench.kernels.impls import Contestant, Prepared, Registry, Unsupported
from bench.kernels.shapes import HEAD_DIM

NAME = "sdpa-cudnn"


def register(registry: Registry) -> None:
    if not torch.backends.cudnn.is_available():
        raise ImportError("this torch has no cuDNN")
    registry.versions["cudnn"] = str(torch.backends.cudnn.version())
    registry.decode.append(Contestant(NAME, _prepare, paged=False))
    registry.prefill.append(Contestant(NAME, _prepare, paged=False))


def _prepare(batch: PagedBatch) -> Prepared:
    sequences, length, new = len(batch.lengths), batch.lengths[0], batch.new_tokens[0]
    if len(set(batch.lengths)) > 1:
        raise Unsupported("needs one length for all sequences")
    if new not in (1, length):
        raise Unsupported("its causal mask is aligned to the top left: no cached prefix")
    query = batch.query.view(sequences, new, batch.heads.query, HEAD_DIM).transpose(1, 2)
    query = query.contiguous()
    sets = [
        batch.arena.contiguous(index, sequences, length, batch.heads.kv)
        for index in range(batch.rotations)
    ]

    def call(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=new > 1, enable_gqa=batch.heads.group > 1
            )

    def packed(out: torch.Tensor) -> torch.Tensor:
        return out.transpose(1, 2).reshape(batch.query.shape)

    def key_value(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = (part[index].transpose(0, 1) for part in sets[0])
        return key, value

    return Prepared([partial(call, *pair) for pair in sets], key_value, packed=packed)
