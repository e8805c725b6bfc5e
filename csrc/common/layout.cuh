// Where every element of K and V lies: the C++ twin of server/bicl/cache/layout.py, which explains the
// notation. tests/unit/test_layout_cpp.py compares the two. Host and device.
#pragma once

#include <cstdint>

#include "../params.h"

#if defined(__CUDACC__)
#define BICL_HD __host__ __device__ __forceinline__
#else
#define BICL_HD inline
#endif

namespace bicl {

constexpr int kChunkBytes = 16;

// Position of a tile along the Z-order curve of a plane. A page has one or two token tiles.
BICL_HD constexpr int z_order(int token_tile, int dim_tile, int token_tiles, int dim_tiles) {
  if (token_tiles == 1) return dim_tile;
  const int pair = dim_tile >> 1;
  // The last tile of an odd count has no partner: its token tiles are neighbours.
  const bool alone = (dim_tile & 1) == 0 && dim_tile + 1 == dim_tiles;
  return 4 * pair + (alone ? token_tile : 2 * token_tile + (dim_tile & 1));
}

// Where 16-byte chunk `chunk` of tile row `row` is stored within that row.
BICL_HD constexpr int swizzle_chunk(int row, int chunk, int row_bytes) {
  if (row_bytes >= 128) return chunk ^ (row & 7);
  if (row_bytes == 64) return chunk ^ ((row >> 1) & 3);
  return chunk ^ ((row >> 2) & 1);
}

// Byte offset of 16-byte chunk `chunk` (of D * e / 16) of token `token` inside one plane of one head.
BICL_HD constexpr int plane_chunk_offset(int token, int chunk, int page_size, int tile,
                                         int padded_head_dim, int bytes) {
  const int row_bytes = tile * bytes;
  const int chunks_per_row = row_bytes / kChunkBytes;
  const int order = z_order(token / tile, chunk / chunks_per_row, page_size / tile,
                            padded_head_dim / tile);
  const int row = token % tile;
  return (order * tile + row) * row_bytes +
         swizzle_chunk(row, chunk % chunks_per_row, row_bytes) * kChunkBytes;
}

BICL_HD constexpr int plane_bytes(const Pages& p) {
  return p.page_size * p.padded_head_dim * element_bytes(p.dtype);
}

// Bytes of one head in one page: K, then V.
BICL_HD constexpr int head_page_bytes(const Pages& p) { return 2 * plane_bytes(p); }

// Byte offset of one head in one page from the start of the layer's pool; 64-bit.
BICL_HD constexpr int64_t head_page_offset(const Pages& p, int64_t page, int head) {
  return (page * p.num_kv_heads + head) * static_cast<int64_t>(head_page_bytes(p));
}

// Byte offset of a 16-byte chunk from the start of the layer's pool. plane: 0 for K, 1 for V.
BICL_HD constexpr int64_t chunk_offset(const Pages& p, int64_t page, int token, int head, int plane,
                                       int chunk) {
  return head_page_offset(p, page, head) + plane * plane_bytes(p) +
         plane_chunk_offset(token, chunk, p.page_size, p.tile, p.padded_head_dim,
                            element_bytes(p.dtype));
}

}  // namespace bicl
