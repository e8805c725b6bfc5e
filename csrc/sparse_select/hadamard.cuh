// The turn that keys' centroids and queries go through before they are rounded: a Hadamard matrix, orthonormal, in
// blocks of the greatest power of two in head_dim. It leaves products as they are, and spreads a dim that lies far out,
// whose range would make the steps of all others wide, over a whole block.
#pragma once

#include "../common/numeric.cuh"

namespace bicl::sparse {

// A multiple of 8, as head_dim is.
__device__ __forceinline__ int turn_block(int head_dim) { return head_dim & -head_dim; }

// sqrt(turn_block()) times the turn of `row` in shared memory, by one warp, which has seen all of it. Sums in the order of
// the CPU's.
__device__ __forceinline__ void turn_row(float* row, int head_dim, int lane) {
#pragma unroll 1
  for (int apart = 1; apart < turn_block(head_dim); apart *= 2) {
    for (int pair = lane; pair < head_dim / 2; pair += 32) {
      float* at = row + pair + (pair & -apart);
      const float a = at[0], b = at[apart];
      at[0] = a + b;
      at[apart] = a - b;
    }
    __syncwarp();
  }
}

// The same of a row in a warp's registers, eight elements a lane.
__device__ __forceinline__ void turn_eighths(float (&values)[8], int head_dim, int lane) {
#pragma unroll
  for (int apart = 1; apart < 8; apart *= 2) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i & apart) continue;
      const float a = values[i], b = values[i + apart];
      values[i] = a + b;
      values[i + apart] = a - b;
    }
  }
#pragma unroll 1
  for (int apart = 1; apart < turn_block(head_dim) / 8; apart *= 2) {
    const float sign = lane & apart ? -1.f : 1.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = fmaf(sign, values[i], __shfl_xor_sync(~0u, values[i], apart));
  }
}

}  // namespace bicl::sparse
