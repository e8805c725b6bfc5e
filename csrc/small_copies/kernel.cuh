// A step's inputs and results, a few KB, by loads and stores over the bus. The copy engines would take turns with
// copies of pages, which last milliseconds.
#pragma once

#include "../common/layout.cuh"

namespace bicl {

constexpr int kSmallCopyThreads = 256;

// Grid: (shares of the largest piece, pieces).
__global__ void __launch_bounds__(kSmallCopyThreads)
    small_copies_kernel(const __grid_constant__ SmallCopiesParams p) {
  const char* source = p.sources[blockIdx.y];
  char* target = p.targets[blockIdx.y];
  const int bytes = p.bytes[blockIdx.y];
  const int first = blockIdx.x * kSmallCopyThreads + threadIdx.x, step = gridDim.x * kSmallCopyThreads;
  const bool aligned = (reinterpret_cast<uintptr_t>(source) | reinterpret_cast<uintptr_t>(target)) % kChunkBytes == 0;
  const int chunks = aligned ? bytes / kChunkBytes : 0;
  for (int i = first; i < chunks; i += step)
    reinterpret_cast<uint4*>(target)[i] = reinterpret_cast<const uint4*>(source)[i];
  for (int i = chunks * kChunkBytes + first; i < bytes; i += step) target[i] = source[i];
}

}  // namespace bicl
