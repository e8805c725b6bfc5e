#pragma once

#include "../../common/launch.h"
#include "../registry.h"
#include "kernel.cuh"

namespace bicl::prefill::mma {

template <typename E, typename KV, int D>
void run(const PrefillParams& p, cudaStream_t stream) {
  // Cheap beside a launch, and right on every device of the process.
  BICL_CUDA_CHECK(cudaFuncSetAttribute(kernel<E, KV, D>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       Config<D>::kSharedBytes));
  LaunchConfig config;
  config.grid = dim3(p.plan.max_tiles * (kPrefillRows / kRows), p.pages.num_kv_heads);
  config.block = dim3(kThreads);
  config.shared_bytes = Config<D>::kSharedBytes;
  config.pdl = p.pdl;
  config.stream = stream;
  launch(kernel<E, KV, D>, config, p);
}

}  // namespace bicl::prefill::mma
