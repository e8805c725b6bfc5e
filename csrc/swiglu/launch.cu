#include "launch.h"

#include <stdexcept>

#include "../common/launch.h"
#include "kernel.cuh"

namespace bicl {
namespace {

constexpr int kVector = 8;

template <typename T, int kElements>
void run(const SwigluParams& p, cudaStream_t stream) {
  const int chunks = p.width / kElements;
  const int64_t threads = p.num_tokens * chunks;
  if (threads >= (int64_t{1} << 31) - kSwigluThreads) throw std::runtime_error("swiglu: too many tokens in one call");
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>((threads + kSwigluThreads - 1) / kSwigluThreads));
  config.block = dim3(kSwigluThreads);
  config.pdl = p.pdl;
  config.stream = stream;
  launch<swiglu_kernel<T, kElements>>(config, p, FastDiv(chunks));
}

template <typename T>
void run(const SwigluParams& p, cudaStream_t stream) {
  const bool vectors = (p.out_stride | p.gate_up_stride | p.width) % kVector == 0 &&
                       (reinterpret_cast<uintptr_t>(p.out) | reinterpret_cast<uintptr_t>(p.gate_up)) % 16 == 0;
  if (vectors) run<T, kVector>(p, stream);
  else run<T, 1>(p, stream);
}

}  // namespace

void swiglu(const SwigluParams& p, cudaStream_t stream) {
  if (p.num_tokens == 0 || p.width == 0) return;
  if (p.dtype == DType::kFloat16) run<__half>(p, stream);
  else run<__nv_bfloat16>(p, stream);
}

}  // namespace bicl
