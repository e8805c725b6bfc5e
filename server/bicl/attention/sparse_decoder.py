"""Decode steps of a sparse layer in one launch, as a backend offers them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bicl.attention.metadata import AttentionMetadata
from bicl.attention.validate import check_no_grad, refuse
from bicl.ops.cuda.sparse import aligned_rows

if TYPE_CHECKING:
    from bicl.ops.cuda.sparse_decode import SparseDecode

__all__ = ["SparseDecoder"]


class SparseDecoder:
    """Chooses pages of one layer and attends to them.

    Args:
        kernel: bound to the layer and to a workspace.
        max_batch: largest batch of the workspace.
        pdl: as the backend's.
    """

    __slots__ = ("_early", "_kernel", "max_batch")

    def __init__(self, kernel: SparseDecode, max_batch: int, *, pdl: bool) -> None:
        self._kernel = kernel
        self._early = (2, 1) if pdl else (0, 0)
        self.max_batch = max_batch

    def run(
        self,
        query: torch.Tensor,
        meta: AttentionMetadata,
        *,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
        after_store: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """See ``AttentionBackend.run``; the LSE is of the keys that were read.

        Args:
            query: ``[B, num_q_heads, head_dim]``.
            meta: a decode step with ``sparsity``, of at most ``max_batch`` sequences.
            after_store: the kernel ahead is this step's ``store_and_index`` of this layer, see
                ``choose_tiles``.

        Raises:
            InvalidInputError: shapes, dtypes or devices that do not fit; the message names them.
            BackendError: the launch failed.
        """
        check_no_grad("query", query)
        batch, num_q_heads = query.shape[:2]
        if out is None:
            out = torch.empty_like(query, memory_format=torch.contiguous_format)
        lse = (
            torch.empty(num_q_heads, batch, dtype=torch.float32, device=query.device)
            if return_lse
            else None
        )
        place = (meta.page_table, meta.cache_seqlens, meta.sparsity, self._early[after_store])
        try:
            try:
                self._kernel(out, lse, query, *place)  # type: ignore[arg-type]
            except ValueError:  # asked after the fact: the question takes host time
                rows = aligned_rows(query)
                if rows is query:
                    raise
                self._kernel(out, lse, rows, *place)  # type: ignore[arg-type]
        except (ValueError, RuntimeError) as error:
            refuse(error)
        return out if lse is None else (out, lse)
