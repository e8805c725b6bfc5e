#include "launch.h"

#include <stdexcept>

#include "../common/launch.h"
#include "kernel.cuh"

namespace bicl {
namespace {

template <typename T, int kTile>
void run(const RotateAndStoreParams& p, cudaStream_t stream) {
  const int pairs = p.store.head_dim * static_cast<int>(sizeof(T)) / (2 * kChunkBytes);
  const int heads = p.num_q_heads + 2 * p.store.pages.num_kv_heads;
  const int64_t threads = static_cast<int64_t>(p.store.num_tokens) * heads * pairs;
  if (threads >= (int64_t{1} << 31) - kRotateThreads)
    throw std::runtime_error("rotate_and_store: too many tokens in one call");
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>((threads + kRotateThreads - 1) / kRotateThreads));
  config.block = dim3(kRotateThreads);
  config.pdl = p.store.pdl;
  config.stream = stream;
  const RotateAndStoreIndex index{FastDiv(pairs), FastDiv(heads)};
  launch<rotate_and_store_kernel<T, kTile>>(config, p, index);
}

template <typename T>
void run(const RotateAndStoreParams& p, cudaStream_t stream) {
  if (p.store.pages.tile == 64) run<T, 64>(p, stream);
  else run<T, 32>(p, stream);
}

}  // namespace

void rotate_and_store(const RotateAndStoreParams& p, cudaStream_t stream) {
  if (p.store.num_tokens == 0) return;
  if (p.store.pages.dtype == DType::kFloat16) run<__half>(p, stream);
  else run<__nv_bfloat16>(p, stream);
}

}  // namespace bicl
