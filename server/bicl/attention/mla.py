"""Decode attention over a latent cache (MLA): one vector a token and layer, shared by all heads.

DeepSeek-V2 and V3 compress keys and values of a token into a latent of 512 dims and add 64 rotated
ones. With the up-projections absorbed into the query and the output, every head attends to the same
576 numbers, of which the first 512 are its values too: 1,152 bytes a token and layer in bf16, in
place of K and V of each head. Pages hold one plane of 9 tiles a token tile; V is a view of it.

A model that keeps its cache so calls, in each layer of a decode step::

    pool = KVPool([latent_layout(torch.bfloat16)] * num_layers, num_pages, "cuda")
    attention = LatentAttention("cuda", max_batch=64, num_heads=16)   # heads on this rank
    ...
    attention.store(pool.layers[i], latent, slots)                    # [B, 576], [B]
    out = attention.decode(query, pool.layers[i], page_table, cache_seqlens, scale=scale)

where ``query`` is ``[q_nope @ W_UK, q_rope]`` and ``latent`` is ``[c_kv, k_rope]``, norm and
rotation done, and ``out @ W_UV`` is the heads' output. Page tables are those of any other cache.
"""

from __future__ import annotations

import functools

import torch

from bicl.attention.pool import LayerCache
from bicl.attention.validate import check_no_grad, check_page_lists, check_tensor
from bicl.cache.layout import PageLayout
from bicl.errors import BackendError, InvalidInputError
from bicl.ops.cpu import latent as cpu
from bicl.ops.cuda import latent as cuda
from bicl.ops.cuda import library

__all__ = ["LATENT_DIM", "VALUE_DIM", "LatentAttention", "latent_layout"]

LATENT_DIM = 576
VALUE_DIM = 512
MAX_BATCH = 2047
GPU_DTYPES = (torch.float16, torch.bfloat16)
CPU_DTYPES = (torch.float32, *GPU_DTYPES)


@functools.cache  # every call compares with it
def latent_layout(dtype: torch.dtype, *, swizzle: bool = True) -> PageLayout:
    """Pages of 64 latents.

    Args:
        dtype: fp16 or bf16; on the CPU float32, too.
        swizzle: as the GPU wants rows; the CPU reads either.
    """
    return PageLayout(1, LATENT_DIM, dtype, 64, 64, planes=1, swizzle=swizzle)


class LatentAttention:
    """Stores latents and attends to them.

    On the GPU everything that changes from step to step is read on the device: a captured graph is
    right for any lengths that its table holds, and nothing waits. With ``out`` and without the LSE
    nothing is allocated, unless rows cannot be read 16 bytes at a time and are copied first. Calls
    of one object must run on one stream, or on streams that wait for one another.

    Args:
        device: where the pages live: a card of compute capability 9.0, or the CPU.
        max_batch: largest number of sequences of a step, at most 2047.
        num_heads: largest number of query heads.
        pdl: programmatic dependent launch: a kernel starts while the one ahead still runs, and
            waits for it before it reads.

    Raises:
        BackendError: the device cannot; the message says what is missing.
        InvalidInputError: ``max_batch`` or ``num_heads`` out of range.
    """

    def __init__(
        self, device: torch.device | str, *, max_batch: int, num_heads: int, pdl: bool = True
    ) -> None:
        if not 1 <= max_batch <= MAX_BATCH:
            raise InvalidInputError(f"max_batch is {max_batch}; 1 to {MAX_BATCH} is possible")
        if num_heads < 1:
            raise InvalidInputError(f"num_heads is {num_heads}; at least 1 is needed")
        self.device = torch.device(device)
        self.max_batch = max_batch
        self.num_heads = num_heads
        self.pdl = pdl
        self._workspace: cuda.LatentWorkspace | None = None
        if self.device.type == "cuda":
            library.require_device(self.device)
            capability = torch.cuda.get_device_capability(self.device)
            if capability != (9, 0):
                raise BackendError(
                    "latent attention is written for compute capability 9.0 (H100, H200); "
                    f"{torch.cuda.get_device_name(self.device)} has "
                    f"{capability[0]}.{capability[1]}; use device 'cpu', or K and V unfolded"
                )
            self._workspace = cuda.LatentWorkspace(self.device, max_batch, num_heads)
            self.device = self._workspace.counters.device  # with its index
        elif self.device.type != "cpu":
            raise BackendError(f"latent attention runs on 'cuda' or 'cpu', not on {self.device}")

    def store(self, layer: LayerCache, latent: torch.Tensor, slots: torch.Tensor) -> None:
        """Write latents to their slots.

        Args:
            latent: ``[T, 576]`` of the pages' dtype.
            slots: int64 ``[T]``, ``page * 64 + offset``; negative ones store nothing. The GPU
                trusts them to lie in the pool, the CPU checks it.

        Raises:
            InvalidInputError: naming the tensor, what was expected and what came.
        """
        self._check_layer(layer)
        check_tensor("slots", slots, (None,), (torch.int64,), self.device)
        shape = (slots.shape[0], LATENT_DIM)
        check_tensor("latent", latent, shape, (layer.layout.dtype,), self.device)
        check_no_grad("latent", latent)
        if self._workspace is not None:
            cuda.store_latent(layer.pages, _aligned(latent), slots.contiguous())
            return
        highest = int(slots.max()) if slots.numel() else -1
        if highest >= layer.num_pages * layer.layout.page_size:
            raise InvalidInputError(
                f"slot {highest} is outside the pool: {layer.num_pages} pages have slots "
                f"0..{layer.num_pages * layer.layout.page_size - 1}"
            )
        cpu.store_latent(layer.pages, layer.layout, latent, slots)

    def decode(
        self,
        query: torch.Tensor,
        layer: LayerCache,
        page_table: torch.Tensor,
        cache_seqlens: torch.Tensor,
        *,
        scale: float,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """One query token a sequence.

        Args:
            query: ``[B, heads, 576]`` of the pages' dtype.
            page_table: int32 ``[B, max_pages]``; entries past ``ceil(length / 64)`` are never read.
            cache_seqlens: int32 ``[B]``, tokens including this step's; 0 gives zeros and an LSE
                of -inf.
            scale: of the scores.
            out: ``[B, heads, 512]`` of the query's dtype, or None for a new tensor.
            return_lse: return the natural logarithm of each row's sum of exponentials, too.

        Returns:
            ``out``, or ``out`` and float32 ``[heads, B]``.

        Raises:
            InvalidInputError: naming the tensor, what was expected and what came.
        """
        self._check_layer(layer)
        check_page_lists(layer, page_table, cache_seqlens)
        batch, dtypes = len(cache_seqlens), (layer.layout.dtype,)
        check_tensor("query", query, (batch, None, LATENT_DIM), dtypes, self.device)
        check_no_grad("query", query)
        heads = query.shape[1]
        if not 1 <= heads <= self.num_heads or batch > self.max_batch:
            raise InvalidInputError(
                f"query has {batch} sequences and {heads} heads; this object was made for "
                f"{self.max_batch} and 1 to {self.num_heads}"
            )
        if not 0.0 < scale < float("inf"):
            raise InvalidInputError(f"scale is {scale}; a positive finite number is needed")
        if out is None:
            out = query.new_empty(batch, heads, VALUE_DIM)
        check_tensor("out", out, (batch, heads, VALUE_DIM), dtypes, self.device)
        lse = query.new_empty(heads, batch, dtype=torch.float32) if return_lse else None
        if self._workspace is None:
            lengths = _checked_lengths(layer, page_table, cache_seqlens)
            cpu.mla_decode(query, layer.pages, layer.layout, page_table, lengths, scale, out, lse)
            return out if lse is None else (out, lse)
        try:
            cuda.mla_decode(
                _aligned(query),
                layer.pages,
                page_table,
                cache_seqlens,
                self._workspace,
                scale=scale,
                out=out,
                lse=lse,
                pdl=self.pdl,
            )
        except ValueError as error:
            raise InvalidInputError(str(error)) from error
        return out if lse is None else (out, lse)

    def _check_layer(self, layer: LayerCache) -> None:
        layout = layer.layout
        swizzled = layout.swizzle or self._workspace is None
        if layout != latent_layout(layout.dtype, swizzle=layout.swizzle) or not swizzled:
            raise InvalidInputError(
                f"latent attention reads pages of latent_layout(dtype), swizzled on the GPU; got "
                f"{layout}"
            )
        allowed = CPU_DTYPES if self._workspace is None else GPU_DTYPES
        check_tensor("pages", layer.pages, layout.shape(layer.num_pages), allowed, self.device)


def _aligned(rows: torch.Tensor) -> torch.Tensor:
    """``rows``, or a copy where 16-byte reads could not take them."""
    strides = [s for s, n in zip(rows.stride()[:-1], rows.shape[:-1], strict=True) if n > 1]
    fits = rows.stride(-1) == 1 and rows.data_ptr() % 16 == 0 and not any(s % 8 for s in strides)
    return rows if fits else rows.clone(memory_format=torch.contiguous_format)


def _checked_lengths(
    layer: LayerCache, page_table: torch.Tensor, cache_seqlens: torch.Tensor
) -> list[int]:
    """Lengths on the host, once they and the pages they reach lie where they may."""
    lengths: list[int] = cache_seqlens.tolist()
    width = page_table.shape[1] * layer.layout.page_size
    if lengths and not 0 <= min(lengths) <= max(lengths) <= width:
        raise InvalidInputError(
            f"cache_seqlens must lie in 0..{width}, which page_table has room for; got {lengths}"
        )
    for sequence, length in enumerate(lengths):
        used = page_table[sequence, : layer.layout.pages_for(length)]
        if used.numel() and not 0 <= int(used.min()) <= int(used.max()) < layer.num_pages:
            raise InvalidInputError(
                f"page_table names a page outside the pool, which has pages "
                f"0..{layer.num_pages - 1}: {used.tolist()}"
            )
    return lengths
