#include "launch.h"

#include <algorithm>
#include <stdexcept>

#include "../common/launch.h"
#include "kernel.cuh"

namespace bicl {
namespace {

constexpr int kVector = 8;

template <typename T, int kElements>
void run(const RmsNormParams& p, cudaStream_t stream) {
  if (p.num_tokens >= int64_t{1} << 31) throw std::runtime_error("rms_norm: too many rows in one call");
  const int warps = (p.width / kElements + 31) / 32;
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(p.num_tokens));
  config.block = dim3(std::min(32 * warps, kMaxRmsNormThreads));
  config.pdl = p.pdl;
  config.stream = stream;
  launch<rms_norm_kernel<T, kElements>>(config, p);
}

template <typename T>
void run(const RmsNormParams& p, cudaStream_t stream) {
  uintptr_t addresses = 0;
  for (const void* data : {p.x, p.weight, static_cast<const void*>(p.out)})
    addresses |= reinterpret_cast<uintptr_t>(data);
  if ((p.x_stride | p.out_stride | p.width) % kVector == 0 && addresses % 16 == 0) run<T, kVector>(p, stream);
  else run<T, 1>(p, stream);
}

}  // namespace

void rms_norm(const RmsNormParams& p, cudaStream_t stream) {
  if (p.num_tokens == 0 || p.width == 0) return;
  if (p.dtype == DType::kFloat16) run<__half>(p, stream);
  else run<__nv_bfloat16>(p, stream);
}

}  // namespace bicl
