// Page copies: a page of a layer is one contiguous piece, so this is a plain copy of large pieces.
#pragma once

#include "../common/layout.cuh"

namespace bicl {

constexpr int kCopyThreads = 256;
constexpr int kCopyUnroll = 4;  // 16-byte loads in flight a thread
constexpr int kCopyBytes = kCopyThreads * kCopyUnroll * kChunkBytes;  // a CTA's share

// Grid: (shares of the largest page, pairs, layers).
__global__ void __launch_bounds__(kCopyThreads) copy_pages_kernel(const __grid_constant__ CopyPagesParams p) {
  const int64_t bytes = p.page_bytes[blockIdx.z];
  char* base = reinterpret_cast<char*>(p.layers[blockIdx.z]);
  for (int pair = blockIdx.y; pair < p.num_pairs; pair += gridDim.y) {
    const char* source = base + p.source[pair] * bytes;
    char* target = base + p.target[pair] * bytes;
    for (int64_t start = static_cast<int64_t>(blockIdx.x) * kCopyBytes; start < bytes;
         start += static_cast<int64_t>(gridDim.x) * kCopyBytes) {
      uint4 data[kCopyUnroll];
#pragma unroll
      for (int i = 0; i < kCopyUnroll; ++i) {
        const int64_t at = start + (i * kCopyThreads + threadIdx.x) * kChunkBytes;
        if (at < bytes) data[i] = *reinterpret_cast<const uint4*>(source + at);
      }
#pragma unroll
      for (int i = 0; i < kCopyUnroll; ++i) {
        const int64_t at = start + (i * kCopyThreads + threadIdx.x) * kChunkBytes;
        if (at < bytes) *reinterpret_cast<uint4*>(target + at) = data[i];
      }
    }
  }
}

}  // namespace bicl
