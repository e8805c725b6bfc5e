#include "launch.h"

#include <stdexcept>

#include "../common/launch.h"
#include "kernel.cuh"

namespace bicl {
namespace {

constexpr int kVector = 8;

// Whether all rows can be read in chunks of kVector.
bool vectors(const RotaryParams& p) {
  const int64_t strides = p.query_token_stride | p.query_head_stride | p.key_token_stride | p.key_head_stride |
                          p.cos_stride | p.sin_stride | p.rotary_dim / 2;
  uintptr_t addresses = 0;
  for (const void* data : {static_cast<const void*>(p.query), static_cast<const void*>(p.key), p.cos, p.sin})
    addresses |= reinterpret_cast<uintptr_t>(data);
  return strides % kVector == 0 && addresses % 16 == 0;
}

template <typename T, int kElements>
void run(const RotaryParams& p, cudaStream_t stream) {
  const int chunks = p.rotary_dim / 2 / kElements, heads = p.num_q_heads + p.num_kv_heads;
  const int64_t threads = static_cast<int64_t>(p.num_tokens) * heads * chunks;
  if (threads >= (int64_t{1} << 31) - kRotaryThreads) throw std::runtime_error("rotate: too many tokens in one call");
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>((threads + kRotaryThreads - 1) / kRotaryThreads));
  config.block = dim3(kRotaryThreads);
  config.pdl = p.pdl;
  config.stream = stream;
  launch<rotate_kernel<T, kElements>>(config, p, FastDiv(chunks), FastDiv(heads));
}

template <typename T>
void run(const RotaryParams& p, cudaStream_t stream) {
  if (vectors(p)) run<T, kVector>(p, stream);
  else run<T, 1>(p, stream);
}

}  // namespace

void rotate(const RotaryParams& p, cudaStream_t stream) {
  if (p.num_tokens == 0 || p.num_q_heads + p.num_kv_heads == 0) return;
  if (p.dtype == DType::kFloat16) run<__half>(p, stream);
  else run<__nv_bfloat16>(p, stream);
}

}  // namespace bicl
