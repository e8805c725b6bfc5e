#pragma once

#include "../../common/launch.h"
#include "../registry.h"
#include "kernel.cuh"

namespace bicl::prefill::sm90 {

template <typename E, int D, bool kLocal, bool kCap>
void launch_variant(const PrefillParams& p, int num_ctas, cudaStream_t stream) {
  const auto variant = kernel<E, D, kLocal, kCap>;
  BICL_CUDA_CHECK(
      cudaFuncSetAttribute(variant, cudaFuncAttributeMaxDynamicSharedMemorySize, Config<D>::kSharedBytes));
  LaunchConfig config;
  config.grid = dim3(num_ctas);
  config.block = dim3(kThreads);
  config.shared_bytes = Config<D>::kSharedBytes;
  config.pdl = p.pdl;
  config.stream = stream;
  launch(variant, config, p);
}

template <typename E, int D>
void run(const PrefillParams& p, int num_ctas, cudaStream_t stream) {
  const bool local = p.window.left < kUnlimited;
  if (local && p.softcap > 0.f) return launch_variant<E, D, true, true>(p, num_ctas, stream);
  if (local) return launch_variant<E, D, true, false>(p, num_ctas, stream);
  if (p.softcap > 0.f) return launch_variant<E, D, false, true>(p, num_ctas, stream);
  return launch_variant<E, D, false, false>(p, num_ctas, stream);
}

}  // namespace bicl::prefill::sm90

// One line makes the kernels of one dtype and head_dim: BICL_PREFILL_SM90(__half, kFloat16, 128)
#define BICL_PREFILL_SM90(E, dtype, D)                                                                \
  static const bicl::prefill::Registration registration_##dtype##_##D(                                \
      {bicl::prefill::Family::kSm90, bicl::DType::dtype, bicl::DType::dtype, D}, bicl::prefill::sm90::run<E, D>);
