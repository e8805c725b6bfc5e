"""The BICL page layout: where every element of K and V lies. Pure host arithmetic, no tensors.

Notation (also used in ``csrc/common/layout.cuh``, its twin; a test compares the two):

=====  =====================================================================
``P``  tokens a page (``page_size``): 64 or 32
``T``  tile edge (``tile``): 64 or 32, ``T <= P``
``D``  ``head_dim`` padded up to a multiple of ``T``
``H``  KV heads on this rank
``e``  bytes an element
=====  =====================================================================

The pool of one layer is ``[num_pages][H][planes][tiles][T][T]`` with planes = (K, V). The
``(P/T) * (D/T)`` tiles of a plane lie in Morton (Z) order of (token tile, dim tile): dim-tile bits
in the even positions, token-tile bits in the odd ones, what is left of the longer index on top.
Inside a tile, row = token. With ``swizzle`` the 16-byte chunks of a row are permuted by the row
number, so that a tile copied as it is into shared memory is free of bank conflicts for ldmatrix
and matches the 128-byte (or 64-byte) swizzle of wgmma descriptors.

``slot = page * P + offset`` names one token's place, as in TGI.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from bicl.errors import LayoutError

__all__ = ["CHUNK_BYTES", "PAGE_SIZES", "SUPPORTED_DTYPES", "TILE_SIZES", "PageLayout", "z_order"]

CHUNK_BYTES = 16
PAGE_SIZES = (32, 64)
TILE_SIZES = (32, 64)
MAX_HEAD_DIM = 1024
SUPPORTED_DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


def _interleave(token_tile: int, dim_tile: int, token_bits: int, dim_bits: int) -> int:
    """Morton key of a tile: shared low bits interleaved, the rest of the longer index on top."""
    shared = min(token_bits, dim_bits)
    key = 0
    for bit in range(shared):
        key |= ((dim_tile >> bit) & 1) << (2 * bit)
        key |= ((token_tile >> bit) & 1) << (2 * bit + 1)
    rest = (dim_tile >> shared) if dim_bits > token_bits else (token_tile >> shared)
    return key | rest << (2 * shared)


def z_order(token_tiles: int, dim_tiles: int) -> np.ndarray:
    """Position of each tile along the Z-order curve.

    Returns int64 ``[token_tiles, dim_tiles]``, a permutation of ``0 .. token_tiles*dim_tiles-1``.
    Counts that are no power of two keep the order of the Morton keys, without holes.
    """
    token_bits = (token_tiles - 1).bit_length()
    dim_bits = (dim_tiles - 1).bit_length()
    keys = np.array(
        [
            [_interleave(t, d, token_bits, dim_bits) for d in range(dim_tiles)]
            for t in range(token_tiles)
        ],
        dtype=np.int64,
    )
    order = np.empty(keys.size, dtype=np.int64)
    order[np.argsort(keys.ravel(), kind="stable")] = np.arange(keys.size)
    return order.reshape(token_tiles, dim_tiles)


@dataclass(frozen=True)
class PageLayout:
    """Shape of one layer's pages.

    Args:
        num_kv_heads: KV heads on this rank.
        head_dim: the model's head_dim, in elements; padded up to a multiple of ``tile``.
        dtype: stored dtype (fp32, fp16, bf16, fp8 e4m3fn / e5m2).
        page_size: tokens a page.
        tile: tile edge.
        planes: 2 (K and V), or 1 for a latent (MLA) whose V is a view of its K.
        swizzle: permute 16-byte chunks for the tensor core. The CPU backend has no tensor core
            and stores plain rows.

    Raises:
        LayoutError: naming the value, what is allowed and what to do.
    """

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    page_size: int = 64
    tile: int = 64
    planes: int = 2
    swizzle: bool = True

    def __post_init__(self) -> None:
        if self.page_size not in PAGE_SIZES:
            raise LayoutError(
                f"page_size {self.page_size} is not supported; use one of {list(PAGE_SIZES)}"
            )
        if self.tile not in TILE_SIZES or self.tile > self.page_size:
            allowed = [t for t in TILE_SIZES if t <= self.page_size]
            raise LayoutError(
                f"tile {self.tile} does not fit page_size {self.page_size}; use one of {allowed}"
            )
        if self.dtype not in SUPPORTED_DTYPES:
            names = [str(d).removeprefix("torch.") for d in SUPPORTED_DTYPES]
            raise LayoutError(f"KV cache dtype {self.dtype} is not supported; use one of {names}")
        if not 1 <= self.head_dim <= MAX_HEAD_DIM:
            raise LayoutError(f"head_dim {self.head_dim} is outside 1..{MAX_HEAD_DIM}")
        if self.num_kv_heads < 1:
            raise LayoutError(f"num_kv_heads is {self.num_kv_heads}; at least 1 is needed")
        if self.planes not in (1, 2):
            raise LayoutError(f"planes is {self.planes}; 2 (K and V) or 1 (latent) is needed")

    # --- sizes -------------------------------------------------------------------------------
    @property
    def element_bytes(self) -> int:
        return self.dtype.itemsize

    @property
    def padded_head_dim(self) -> int:
        """``D``: head_dim rounded up to a multiple of the tile."""
        return -(-self.head_dim // self.tile) * self.tile

    @property
    def padding_waste(self) -> float:
        """Share of the pool's bytes that only pads head_dim; 0.0 if the tile divides it."""
        return 1.0 - self.head_dim / self.padded_head_dim

    @property
    def token_tiles(self) -> int:
        return self.page_size // self.tile

    @property
    def dim_tiles(self) -> int:
        return self.padded_head_dim // self.tile

    @property
    def tiles(self) -> int:
        """Tiles of one plane of one head in one page."""
        return self.token_tiles * self.dim_tiles

    @property
    def tile_bytes(self) -> int:
        return self.tile * self.tile * self.element_bytes

    @property
    def head_page_bytes(self) -> int:
        """Bytes of one head in one page, K then V, contiguous."""
        return self.planes * self.page_size * self.padded_head_dim * self.element_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one layer, contiguous."""
        return self.num_kv_heads * self.head_page_bytes

    @property
    def chunk_elements(self) -> int:
        """Elements in one 16-byte chunk."""
        return CHUNK_BYTES // self.element_bytes

    def shape(self, num_pages: int) -> tuple[int, int, int, int, int, int]:
        """Shape of one layer's pool tensor."""
        return (num_pages, self.num_kv_heads, self.planes, self.tiles, self.tile, self.tile)

    # --- places ------------------------------------------------------------------------------
    def swizzle_chunk(self, row: int, chunk: int) -> int:
        """Where 16-byte chunk ``chunk`` of tile row ``row`` is stored within that row."""
        if not self.swizzle:
            return chunk
        row_bytes = self.tile * self.element_bytes
        if row_bytes >= 128:
            return chunk ^ (row & 7)
        if row_bytes == 64:
            return chunk ^ ((row >> 1) & 3)
        return chunk ^ ((row >> 2) & 1)

    @cached_property
    def plane_offsets(self) -> np.ndarray:
        """int64 ``[page_size, padded_head_dim]``: element offset of (token, dim) inside a plane."""
        tile, per_chunk = self.tile, self.chunk_elements
        order = z_order(self.token_tiles, self.dim_tiles)
        token, dim = np.meshgrid(
            np.arange(self.page_size), np.arange(self.padded_head_dim), indexing="ij"
        )
        row, column = token % tile, dim % tile
        swizzled = np.array(
            [[self.swizzle_chunk(r, c) for c in range(tile // per_chunk)] for r in range(tile)]
        )
        column = swizzled[row, column // per_chunk] * per_chunk + column % per_chunk
        offsets = order[token // tile, dim // tile] * tile * tile + row * tile + column
        offsets.setflags(write=False)
        return offsets

    def element_offset(self, slot: int, head: int, plane: int, dim: int) -> int:
        """Element offset from the start of the layer's pool.

        Args:
            slot: ``page * page_size + offset``.
            head: KV head on this rank.
            plane: 0 for K, 1 for V.
            dim: element of the (padded) head_dim.
        """
        page, token = divmod(slot, self.page_size)
        plane_elements = self.page_size * self.padded_head_dim
        index = (page * self.num_kv_heads + head) * self.planes + plane
        return index * plane_elements + int(self.plane_offsets[token, dim])

    def pages_for(self, num_tokens: int) -> int:
        """Pages that ``num_tokens`` tokens occupy."""
        return -(-num_tokens // self.page_size)
