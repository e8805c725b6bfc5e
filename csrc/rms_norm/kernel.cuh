// A row over its root mean square, weighted: in float32, rounded once. A CTA a row; what it reads twice stays in L1.
#pragma once

#include "../common/numeric.cuh"
#include "../common/ptx.cuh"

namespace bicl {

constexpr int kMaxRmsNormThreads = 512;

__device__ __forceinline__ float rms_norm_block_sum(float value) {
  __shared__ float sums[kMaxRmsNormThreads / 32];
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  if (lane == 0) sums[threadIdx.x / 32] = value;
  __syncthreads();
  value = lane < warps ? sums[lane] : 0.f;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  return value;
}

template <typename T, int kElements>
__global__ void __launch_bounds__(kMaxRmsNormThreads) rms_norm_kernel(const __grid_constant__ RmsNormParams p) {
  using Chunk = Elements<T, kElements>;
  const int chunks = p.width / kElements;
  const auto* x = reinterpret_cast<const Chunk*>(static_cast<const T*>(p.x) + blockIdx.x * p.x_stride);
  auto* out = reinterpret_cast<Chunk*>(static_cast<T*>(p.out) + blockIdx.x * p.out_stride);
  const auto* weight = static_cast<const Chunk*>(p.weight);
  if (threadIdx.x < chunks) ptx::prefetch(weight + threadIdx.x);  // which nobody is writing
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  float sum = 0.f;
  for (int c = threadIdx.x; c < chunks; c += blockDim.x) {
    const Chunk own = x[c];
#pragma unroll
    for (int i = 0; i < kElements; ++i) sum += to_float(own.at[i]) * to_float(own.at[i]);
  }
  const float scale = rsqrtf(rms_norm_block_sum(sum) / p.width + p.eps);
  for (int c = threadIdx.x; c < chunks; c += blockDim.x) {
    Chunk own = x[c];
    const Chunk weights = weight[c];
#pragma unroll
    for (int i = 0; i < kElements; ++i) own.at[i] = from_float<T>(to_float(own.at[i]) * scale * to_float(weights.at[i]));
    out[c] = own;
  }
}

}  // namespace bicl
