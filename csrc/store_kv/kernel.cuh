// Rows of K and V to tiles, one thread a 16-byte chunk of the pool.
//
// Consecutive threads take consecutive chunks of one row, so reads are coalesced; a row lands as whole
// tile rows (128 bytes for 64-wide tiles of 16-bit elements).
#pragma once

#include "../common/fast_div.h"
#include "../common/layout.cuh"
#include "../common/numeric.cuh"
#include "../common/ptx.cuh"

namespace bicl {

struct StoreKvIndex {
  FastDiv chunks;  // D * e / 16
  FastDiv heads;
  int page_log2;
};

// The chunk of elements that starts at column `first`, as stored. Columns past head_dim are zero.
template <typename In, typename Out>
__device__ __forceinline__ uint4 load_chunk(const In* row, int first, int head_dim, float scale,
                                            bool vectors) {
  constexpr int kElements = kChunkBytes / sizeof(Out);
  constexpr int kVectors = kElements * sizeof(In) / 16;  // 16-byte reads that fill one chunk
  alignas(16) In in[kElements];
  if (vectors && first + kElements <= head_dim) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
      reinterpret_cast<uint4*>(in)[i] = ptx::load_now(reinterpret_cast<const uint4*>(row + first) + i);
  } else {
#pragma unroll
    for (int i = 0; i < kElements; ++i)
      in[i] = first + i < head_dim ? row[first + i] : from_float<In>(0.f);
  }
  if constexpr (sizeof(In) == sizeof(Out)) return *reinterpret_cast<uint4*>(in);
  alignas(16) Out out[kElements];
#pragma unroll
  for (int i = 0; i < kElements; ++i) out[i] = from_float<Out>(to_float(in[i]) / scale);
  return *reinterpret_cast<uint4*>(out);
}

template <typename In, typename Out, int kTile>
__global__ void __launch_bounds__(256)
    store_kv_kernel(const __grid_constant__ StoreKvParams p, const StoreKvIndex index, bool vectors) {
  ptx::grid_dependency_wait();
  // Only now: a decode kernel launched behind this one may read all that this one's predecessors wrote.
  ptx::grid_launch_dependents();
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  uint32_t chunk, head;
  const uint32_t token = index.heads.divide(index.chunks.divide(i, chunk), head);
  if (token >= p.num_tokens) return;
  const int64_t slot = p.slots[token];
  const int first = chunk * (kChunkBytes / sizeof(Out));
  const In* key = static_cast<const In*>(p.key) + token * p.key_token_stride + head * p.key_head_stride;
  const In* value = static_cast<const In*>(p.value) + token * p.value_token_stride + head * p.value_head_stride;
  const uint4 k = load_chunk<In, Out>(key, first, p.head_dim, p.pages.k_scale, vectors);
  const uint4 v = load_chunk<In, Out>(value, first, p.head_dim, p.pages.v_scale, vectors);
  if (slot < 0) return;  // only now: the rows are on their way while the slot comes
  const int64_t page = slot >> index.page_log2;
  const int row = static_cast<int>(slot) & (p.pages.page_size - 1);
  char* target = static_cast<char*>(p.pages.data) + head_page_offset(p.pages, page, head) +
                 plane_chunk_offset(row, chunk, p.pages.page_size, kTile, p.pages.padded_head_dim, sizeof(Out));
  const int plane_size = p.pages.page_size * p.pages.padded_head_dim * static_cast<int>(sizeof(Out));
  *reinterpret_cast<uint4*>(target) = k;
  *reinterpret_cast<uint4*>(target + plane_size) = v;
}

}  // namespace bicl
