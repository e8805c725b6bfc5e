"""A decode step that chooses the pages it reads, in one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from bicl.ops.cuda import library
from bicl.ops.cuda.sparse import COMBINES

if TYPE_CHECKING:
    from bicl.ops.cuda.workspace import Workspace
    from bicl.sparse.index import LayerIndex
    from bicl.sparse.selection import SelectionRule

__all__ = ["SparseDecode", "bind_sparse_decode"]


class SparseDecode(Protocol):
    """The kernel bound to a layer."""

    def __call__(
        self,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        query: torch.Tensor,
        page_table: torch.Tensor,
        cache_seqlens: torch.Tensor,
        sparsity: torch.Tensor,
        pdl: int,
        /,
    ) -> None:
        """Attention over the pages that ``choose_tiles`` would list.

        Args:
            out: ``[B, num_q_heads, head_dim]``, overwritten.
            lse: float32 ``[num_q_heads, B]``, overwritten: of the keys that were read.
            query: fp16 or bf16 ``[B, num_q_heads, head_dim]``, rows 16-byte aligned.
            page_table: int32 ``[B, max_pages]``; cache_seqlens: int32 ``[B]``.
            sparsity: float32 ``[B]``, the share to leave out; 0 reads a row whole.
            pdl: 0: off; 1: the kernel ahead may still run, and the one ahead of that; they write
                nothing that is read but the query, newest tokens and the index of their pages; 2:
                they may write anything, and are waited for before anything is read.

        Raises:
            ValueError: shapes, dtypes or devices that do not fit; the message names them.
            RuntimeError: the launch failed.
        """


def bind_sparse_decode(
    index: LayerIndex,
    rule: SelectionRule,
    combine: str,
    workspace: Workspace,
    num_q_heads: int,
    scale: float,
    softcap: float = 0.0,
    deterministic: bool = False,
) -> SparseDecode | None:
    """The kernel with all that stays the same from step to step handed over and checked already.

    Args:
        index: of the layer, of kind ``centroids``.
        combine: how the query heads of a KV head agree: ``softmax``, ``sum`` or ``max``.
        workspace: partial results; one stream at a time. It and the index must outlive what is
            returned.
        scale: of the attention scores, those of the choice too; softcap: of attention alone.
        deterministic: the result of a sequence depends on nothing but itself.

    Returns:
        None where there is no such kernel for these pages, heads and this card: then
        ``choose_tiles`` and ``decode_attention`` do the same in two launches.

    Raises:
        ValueError: pages, index or options that do not fit; the message names why.
    """
    layer = index.layer
    bound: SparseDecode | None = library.module().bind_sparse_decode(
        layer.pages,
        layer.layout.page_size,
        layer.k_scale,
        layer.v_scale,
        workspace.partials,
        workspace.counters,
        scale,
        softcap,
        deterministic,
        num_q_heads,
        index.vectors,
        index.weights,
        index.share,
        rule.max_k,
        rule.first,
        rule.recent,
        rule.floor,
        rule.stratum,
        COMBINES[combine],
    )
    return bound
