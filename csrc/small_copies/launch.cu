#include "launch.h"

#include <algorithm>

#include "../common/launch.h"
#include "kernel.cuh"

namespace bicl {

void small_copies(const SmallCopiesParams& p, cudaStream_t stream) {
  if (p.count == 0) return;
  constexpr int kShare = kSmallCopyThreads * kChunkBytes;
  const int largest = *std::max_element(p.bytes, p.bytes + p.count);
  LaunchConfig config;
  config.grid = dim3(std::clamp(largest / kShare, 1, 64), p.count);
  config.block = dim3(kSmallCopyThreads);
  config.stream = stream;
  launch<small_copies_kernel>(config, p);
}

}  // namespace bicl
