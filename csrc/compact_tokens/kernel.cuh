// Chosen tokens of each KV head side by side in other pages, one thread a 16-byte chunk of K and of V.
#pragma once

#include "../common/fast_div.h"
#include "../common/layout.cuh"

namespace bicl {

constexpr int kCompactThreads = 256;

// Grid: (chunks of the tokens, KV heads).
__global__ void __launch_bounds__(kCompactThreads)
    compact_tokens_kernel(const __grid_constant__ CompactTokensParams p, const FastDiv chunks) {
  uint32_t chunk;
  const uint32_t i = chunks.divide(blockIdx.x * blockDim.x + threadIdx.x, chunk);
  if (i >= static_cast<uint32_t>(p.num_tokens)) return;
  const int head = blockIdx.y, size = p.source.page_size;
  const uint32_t position = p.positions[head * p.positions_stride + i];
  const char* source = static_cast<const char*>(p.source.data) +
                       chunk_offset(p.source, p.page_table[position / size], position % size, head, 0, chunk);
  char* target = static_cast<char*>(p.target.data) +
                 chunk_offset(p.target, p.target_pages[i / size], i % size, head, 0, chunk);
  const int plane = plane_bytes(p.source);
  const uint4 k = *reinterpret_cast<const uint4*>(source);
  const uint4 v = *reinterpret_cast<const uint4*>(source + plane);
  *reinterpret_cast<uint4*>(target) = k;
  *reinterpret_cast<uint4*>(target + plane) = v;
}

}  // namespace bicl
