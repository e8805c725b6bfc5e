// Rotary embedding, half split: dims i and i + R / 2 of a head turn together. In float32, rounded once.
//
// One thread turns kElements pairs of one head: 16-byte accesses where rows allow them, single elements elsewhere.
#pragma once

#include "../common/fast_div.h"
#include "../common/numeric.cuh"
#include "../common/ptx.cuh"

namespace bicl {

constexpr int kRotaryThreads = 128;

template <typename T, int kElements>
struct alignas(kElements * sizeof(T)) RotaryChunk {
  T at[kElements];
};

template <typename T, int kElements>
__global__ void __launch_bounds__(kRotaryThreads)
    rotate_kernel(const __grid_constant__ RotaryParams p, const FastDiv chunks, const FastDiv heads) {
  using Chunk = RotaryChunk<T, kElements>;
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  uint32_t chunk, head;
  const int64_t token = heads.divide(chunks.divide(blockIdx.x * kRotaryThreads + threadIdx.x, chunk), head);
  if (token >= p.num_tokens) return;
  const bool is_query = head < static_cast<uint32_t>(p.num_q_heads);
  T* row = is_query ? static_cast<T*>(p.query) + token * p.query_token_stride + head * p.query_head_stride
                    : static_cast<T*>(p.key) + token * p.key_token_stride + (head - p.num_q_heads) * p.key_head_stride;
  const int first = chunk * kElements, half = p.rotary_dim / 2;
  const auto part = [&](const T* of, int at) { return reinterpret_cast<const Chunk*>(of + at); };
  const T* cos_row = static_cast<const T*>(p.cos) + token * p.cos_stride;
  const T* sin_row = static_cast<const T*>(p.sin) + token * p.sin_stride;
  Chunk x = *part(row, first), y = *part(row, first + half);
  const Chunk cos_x = *part(cos_row, first), cos_y = *part(cos_row, first + half);
  const Chunk sin_x = *part(sin_row, first), sin_y = *part(sin_row, first + half);
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    const float a = to_float(x.at[i]), b = to_float(y.at[i]);
    x.at[i] = from_float<T>(a * to_float(cos_x.at[i]) - b * to_float(sin_x.at[i]));
    y.at[i] = from_float<T>(b * to_float(cos_y.at[i]) + a * to_float(sin_y.at[i]));
  }
  *reinterpret_cast<Chunk*>(row + first) = x;
  *reinterpret_cast<Chunk*>(row + first + half) = y;
}

}  // namespace bicl
