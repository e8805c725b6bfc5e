// silu(gate) * up in float32, rounded once; a thread has kElements of a row.
#pragma once

#include "../common/fast_div.h"
#include "../common/numeric.cuh"
#include "../common/ptx.cuh"

namespace bicl {

constexpr int kSwigluThreads = 128;

template <typename T, int kElements>
__global__ void __launch_bounds__(kSwigluThreads)
    swiglu_kernel(const __grid_constant__ SwigluParams p, const FastDiv chunks) {
  using Chunk = Elements<T, kElements>;
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  uint32_t chunk;
  const int64_t token = chunks.divide(blockIdx.x * kSwigluThreads + threadIdx.x, chunk);
  if (token >= p.num_tokens) return;
  const T* row = static_cast<const T*>(p.gate_up) + token * p.gate_up_stride + chunk * kElements;
  Chunk gate = *reinterpret_cast<const Chunk*>(row);
  const Chunk up = *reinterpret_cast<const Chunk*>(row + p.width);
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    const float g = to_float(gate.at[i]);
    gate.at[i] = from_float<T>(g / (1.f + __expf(-g)) * to_float(up.at[i]));
  }
  *reinterpret_cast<Chunk*>(static_cast<T*>(p.out) + token * p.out_stride + chunk * kElements) = gate;
}

}  // namespace bicl
