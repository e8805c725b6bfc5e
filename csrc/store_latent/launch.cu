#include "launch.h"

#include <stdexcept>

#include "../common/launch.h"
#include "kernel.cuh"

namespace bicl {

void store_latent(const StoreLatentParams& p, cudaStream_t stream) {
  if (p.num_tokens == 0) return;
  const int64_t total = static_cast<int64_t>(p.num_tokens) * kLatentChunks;
  if (total >= (int64_t{1} << 31)) throw std::runtime_error("store_latent: too many tokens in one call");
  // A decode step has few rows: small CTAs spread them over more SMs.
  constexpr int64_t kFewChunks = 1 << 15;
  const int threads = total <= kFewChunks ? 64 : 256;
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>((total + threads - 1) / threads));
  config.block = dim3(threads);
  config.stream = stream;
  launch<store_latent_kernel>(config, p);
}

}  // namespace bicl
