#include "launch.h"

#include <algorithm>

#include "../common/launch.h"
#include "kernel.cuh"

namespace bicl {

void copy_pages(const CopyPagesParams& p, cudaStream_t stream) {
  if (p.num_pairs == 0 || p.num_layers == 0) return;
  constexpr int kShares = 16;  // 256 KiB at once; larger pages loop
  LaunchConfig config;
  config.grid = dim3(kShares, std::min(p.num_pairs, 65535), p.num_layers);
  config.block = dim3(kCopyThreads);
  config.stream = stream;
  launch<copy_pages_kernel>(config, p);
}

}  // namespace bicl
