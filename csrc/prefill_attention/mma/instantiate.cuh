#pragma once

#include "../../common/launch.h"
#include "../registry.h"
#include "kernel.cuh"

namespace bicl::prefill::mma {

template <typename E, typename KV, int D>
void run(const PrefillParams& p, int, cudaStream_t stream) {
  allow_shared_bytes<kernel<E, KV, D>>(Config<D>::kSharedBytes);
  LaunchConfig config;
  config.grid = dim3(p.plan.max_tiles * (kPrefillRows / kRows), p.pages.num_kv_heads);
  config.block = dim3(kThreads);
  config.shared_bytes = Config<D>::kSharedBytes;
  config.pdl = p.pdl;
  config.stream = stream;
  launch<kernel<E, KV, D>>(config, p);
}

}  // namespace bicl::prefill::mma

// One line makes one kernel: BICL_PREFILL_MMA(__half, kFloat16, __nv_fp8_e4m3, kFloat8E4M3, 128)
#define BICL_PREFILL_MMA(E, dtype, KV, stored, D)                                                     \
  static const bicl::prefill::Registration registration_##dtype##_##stored##_##D(                     \
      {bicl::prefill::Family::kMma, bicl::DType::dtype, bicl::DType::stored, D, 0}, bicl::prefill::mma::run<E, KV, D>);
