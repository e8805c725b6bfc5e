"""Device memory that kernels need beside their arguments."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from bicl.ops.cuda import library

if TYPE_CHECKING:
    from bicl.attention.pool import LayerCache

__all__ = ["Workspace"]


class Workspace:
    """Partial results and arrival counters of split attention.

    Allocated once, outside CUDA graphs. Counters are zero between launches: each launch resets
    what it used. After a failed launch they are not to be trusted; the process should end. Two
    streams must never run kernels over one workspace at the same time.

    Args:
        device: where the pages live.
        padded_head_dim: largest of the layers.
        group: largest number of query heads a KV head serves.
        max_pairs: largest ``batch * num_q_heads`` of a step.
        deterministic: room for the finer cuts of that mode.
    """

    def __init__(
        self,
        device: torch.device | str,
        padded_head_dim: int,
        group: int,
        max_pairs: int,
        *,
        deterministic: bool = False,
    ) -> None:
        self.padded_head_dim = padded_head_dim
        self.group = group
        self.max_pairs = max_pairs
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        num_bytes = library.module().decode_workspace_bytes(
            padded_head_dim, group, deterministic, num_sms
        )
        self.partials = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.counters = torch.zeros(max_pairs, dtype=torch.int32, device=device)
        self._bound: dict[
            tuple[object, ...], tuple[weakref.ref[LayerCache], Callable[..., None]]
        ] = {}

    def decode_attention_on(
        self,
        layer: LayerCache,
        scale: float,
        softcap: float = 0.0,
        window_left: int = -1,
        deterministic: bool = False,
        force_sm80: bool = False,
        force_cluster: int = 0,
        force_grid: int = 0,
    ) -> Callable[..., None]:
        """The decode kernel with all that stays the same from step to step handed over already,
        which spares the host a quarter of a launch. Options: see ``decode_attention``.

        Returns:
            ``(out, lse, query, page_table, cache_seqlens, plan, pdl) -> None``; ``pdl`` 0: off, 1:
            the kernel ahead may still be writing the newest tokens, 2: and the table, 3: and the
            lengths.

        Raises:
            ValueError: pages or options that the kernel cannot take; the message names why.
        """
        options = (scale, softcap, window_left, deterministic)
        forced = (force_sm80, force_cluster, force_grid)
        key = (id(layer), *options, *forced)
        found = self._bound.get(key)
        if found is not None and found[0]() is layer:
            return found[1]
        function: Callable[..., None] = library.module().bind_decode_attention(
            layer.pages,
            layer.layout.page_size,
            layer.k_scale,
            layer.v_scale,
            self.partials,
            self.counters,
            *options,
            *forced,
        )

        def forget(_: object) -> None:  # the id may be used again
            self._bound.pop(key, None)

        self._bound[key] = weakref.ref(layer, forget), function
        return function

    def fits(self, padded_head_dim: int, group: int, pairs: int) -> bool:
        """Whether calls of this size may use it."""
        return (
            padded_head_dim <= self.padded_head_dim
            and group <= self.group
            and pairs <= self.max_pairs
        )
