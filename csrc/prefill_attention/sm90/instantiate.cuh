#pragma once

#include "../../common/launch.h"
#include "../registry.h"
#include "kernel.cuh"

namespace bicl::prefill::sm90 {

template <typename E, typename KV, int D, int kTile, bool kLocal, bool kCap>
void launch_variant(const PrefillParams& p, int num_ctas, cudaStream_t stream) {
  allow_shared_bytes<kernel<E, KV, D, kTile, kLocal, kCap>>(Config<KV, D, kTile>::kSharedBytes);
  LaunchConfig config;
  config.grid = dim3(num_ctas);
  config.block = dim3(kThreads);
  config.shared_bytes = Config<KV, D, kTile>::kSharedBytes;
  config.pdl = p.pdl;
  config.stream = stream;
  launch<kernel<E, KV, D, kTile, kLocal, kCap>>(config, p);
}

template <typename E, typename KV, int D, int kTile>
void run(const PrefillParams& p, int num_ctas, cudaStream_t stream) {
  const bool local = p.window.left < kUnlimited, capped = p.softcap > 0.f;
  if constexpr (Config<KV, D, kTile>::kWiden) {  // capped without a window: the widest one
    if (capped) return launch_variant<E, KV, D, kTile, true, true>(p, num_ctas, stream);
  } else {
    if (local && capped) return launch_variant<E, KV, D, kTile, true, true>(p, num_ctas, stream);
    if (capped) return launch_variant<E, KV, D, kTile, false, true>(p, num_ctas, stream);
  }
  if (local) return launch_variant<E, KV, D, kTile, true, false>(p, num_ctas, stream);
  return launch_variant<E, KV, D, kTile, false, false>(p, num_ctas, stream);
}

}  // namespace bicl::prefill::sm90

// One line makes the kernels of a query dtype, a stored one, a head_dim and a tile:
// BICL_PREFILL_SM90(__half, kFloat16, __nv_fp8_e4m3, kFloat8E4M3, 128, 64)
#define BICL_PREFILL_SM90(E, dtype, KV, stored, D, tile)                                              \
  static const bicl::prefill::Registration registration_##dtype##_##stored##_##D##_##tile(            \
      {bicl::prefill::Family::kSm90, bicl::DType::dtype, bicl::DType::stored, D, tile},                \
      bicl::prefill::sm90::run<E, KV, D, tile>);
