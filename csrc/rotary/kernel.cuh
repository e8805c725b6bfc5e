// Rotary embedding of queries and keys in place.
//
// One thread turns kElements pairs of one head: 16-byte accesses where rows allow them, single elements elsewhere.
#pragma once

#include "../common/fast_div.h"
#include "../common/ptx.cuh"
#include "turn.cuh"

namespace bicl {

constexpr int kRotaryThreads = 128;

template <typename T, int kElements>
__global__ void __launch_bounds__(kRotaryThreads)
    rotate_kernel(const __grid_constant__ RotaryParams p, const FastDiv chunks, const FastDiv heads) {
  using Chunk = Elements<T, kElements>;
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  uint32_t chunk, head;
  const int64_t token = heads.divide(chunks.divide(blockIdx.x * kRotaryThreads + threadIdx.x, chunk), head);
  if (token >= p.num_tokens) return;
  const bool is_query = head < static_cast<uint32_t>(p.num_q_heads);
  T* row = is_query ? static_cast<T*>(p.query) + token * p.query_token_stride + head * p.query_head_stride
                    : static_cast<T*>(p.key) + token * p.key_token_stride + (head - p.num_q_heads) * p.key_head_stride;
  const int first = chunk * kElements, half = p.rotary_dim / 2;
  auto &own = *reinterpret_cast<Chunk*>(row + first), &other = *reinterpret_cast<Chunk*>(row + first + half);
  Chunk x = own, y = other;
  turn<T>(x, y, static_cast<const T*>(p.cos) + token * p.cos_stride + first,
          static_cast<const T*>(p.sin) + token * p.sin_stride + first, half);
  own = x;
  other = y;
}

}  // namespace bicl
