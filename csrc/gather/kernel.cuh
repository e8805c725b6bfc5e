// Tiles back to rows, one thread a 16-byte chunk of the pool; store_kv backwards.
#pragma once

#include "../common/fast_div.h"
#include "../common/layout.cuh"
#include "../common/numeric.cuh"

namespace bicl {

constexpr int kGatherThreads = 256;

template <typename Stored, typename Out>
__device__ __forceinline__ void spread_chunk(const uint4& chunk, Out* row, int first, int head_dim, float scale) {
  constexpr int kElements = kChunkBytes / sizeof(Stored);
  const auto* in = reinterpret_cast<const Stored*>(&chunk);
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    if (first + i >= head_dim) return;
    if constexpr (sizeof(Stored) == sizeof(Out))
      row[first + i] = *reinterpret_cast<const Out*>(&in[i]);
    else
      row[first + i] = from_float<Out>(to_float(in[i]) * scale);
  }
}

// Grid: (chunks of a page's tokens, pages of the longest sequence, sequences).
template <typename Stored, typename Out>
__global__ void __launch_bounds__(kGatherThreads)
    gather_kernel(const __grid_constant__ GatherParams p, const FastDiv chunks, const FastDiv heads) {
  const int length = p.sequences.cache_seqlens[blockIdx.z];
  const int first = blockIdx.y * p.pages.page_size;
  if (first >= length) return;
  const int64_t page = p.sequences.page_table[blockIdx.z * p.sequences.page_table_stride + blockIdx.y];
  uint32_t chunk, head;
  const uint32_t token = heads.divide(chunks.divide(blockIdx.x * blockDim.x + threadIdx.x, chunk), head);
  if (token >= p.pages.page_size || first + static_cast<int>(token) >= length) return;
  const char* source =
      static_cast<const char*>(p.pages.data) + chunk_offset(p.pages, page, token, head, 0, chunk);
  const uint4 k = *reinterpret_cast<const uint4*>(source);
  const uint4 v = *reinterpret_cast<const uint4*>(source + plane_bytes(p.pages));
  const int64_t row = ((p.offsets[blockIdx.z] + first + token) * p.pages.num_kv_heads + head) * p.head_dim;
  const int dim = chunk * (kChunkBytes / sizeof(Stored));
  spread_chunk<Stored>(k, static_cast<Out*>(p.key) + row, dim, p.head_dim, p.pages.k_scale);
  spread_chunk<Stored>(v, static_cast<Out*>(p.value) + row, dim, p.head_dim, p.pages.v_scale);
}

}  // namespace bicl
