"""A decode step's inputs go into TGI's captured graph in one launch, not in eleven."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from bicl.ops.cuda.stage_step import bind_stage_step

__all__ = ["stage_in_one_launch"]

INPUTS = ("input_ids", "position_ids", "slots", "input_lengths", "cache_lengths", "block_tables")
"""Names that TGI gives to a graph's own tensors, in the order of the kernel's arguments."""


def stage_in_one_launch(model_class: Any) -> None:
    """Wrap TGI's FlashCausalLM. Steps of another kind (prefill, drafts, rows beyond the largest
    graph) and models with a ``forward`` of their own go TGI's way."""
    forward = model_class.forward

    @functools.wraps(forward)
    def staged_forward(self: Any, batch: Any, adapter_data: Any) -> Any:
        if batch.cu_seqlen_prefill is not None or batch.speculative_ids is not None:
            return forward(self, batch, adapter_data)
        rows = batch.input_ids.shape[0]
        size = min((size for size in self.cuda_graphs if size >= rows), default=0)
        if not size or batch.position_ids.dim() != 1:
            return forward(self, batch, adapter_data)
        graph = self.cuda_graphs[size]
        try:
            _stage_into(graph)(*_sources(batch))
        except ValueError as error:
            # Of all exceptions only a RuntimeError makes TGI stop the shard.
            raise RuntimeError(f"bicl: entering a CUDA graph failed: {error}") from error
        graph["graph"].replay()
        return graph["logits"][:rows], _head(graph["speculative_logits"], rows)

    model_class.forward = staged_forward


def _sources(batch: Any) -> tuple[torch.Tensor, ...]:
    return (
        batch.input_ids,
        batch.position_ids,
        batch.slots,
        batch.slot_indices,
        batch.input_lengths_tensor,
        batch.cache_lengths_tensor,
        batch.block_tables_tensor,
    )


def _head(logits: torch.Tensor | None, rows: int) -> torch.Tensor | None:
    return None if logits is None else logits[:rows]


def _stage_into(graph: dict[str, Any]) -> Callable[..., None]:
    """The kernel with a graph's own tensors handed over; it lives beside them."""
    if "bicl_stage" not in graph:
        graph["bicl_stage"] = bind_stage_step(*(graph[name] for name in INPUTS))
    found: Callable[..., None] = graph["bicl_stage"]
    return found
