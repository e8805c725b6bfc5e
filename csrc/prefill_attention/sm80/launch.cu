#include <stdexcept>
#include <string>

#include "../../common/launch.h"
#include "../launch.h"
#include "kernel.cuh"

namespace bicl {
namespace {

template <typename E, typename KV, int D>
void run(const PrefillParams& p, cudaStream_t stream) {
  using Config = prefill::sm80::Config<D>;
  const auto kernel = prefill::sm80::kernel<E, KV, D>;
  // Cheap beside a launch, and right on every device of the process.
  BICL_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Config::kSharedBytes));
  LaunchConfig config;
  config.grid = dim3(p.plan.max_tiles * (kPrefillRows / prefill::sm80::kRows), p.pages.num_kv_heads);
  config.block = dim3(prefill::sm80::kThreads);
  config.shared_bytes = Config::kSharedBytes;
  config.stream = stream;
  launch(kernel, config, p);
}

template <typename E, typename KV>
void run_dims(const PrefillParams& p, cudaStream_t stream) {
  switch (p.pages.padded_head_dim) {
    case 32: return run<E, KV, 32>(p, stream);
    case 64: return run<E, KV, 64>(p, stream);
    case 96: return run<E, KV, 96>(p, stream);
    case 128: return run<E, KV, 128>(p, stream);
    case 160: return run<E, KV, 160>(p, stream);
    case 192: return run<E, KV, 192>(p, stream);
    case 256: return run<E, KV, 256>(p, stream);
    default:
      throw std::invalid_argument("prefill_attention: padded head_dim " + std::to_string(p.pages.padded_head_dim) +
                                  " has no kernel; 32, 64, 96, 128, 160, 192 and 256 have");
  }
}

template <typename E>
void run_kv(const PrefillParams& p, cudaStream_t stream) {
  switch (p.pages.dtype) {
    case DType::kFloat8E4M3: return run_dims<E, __nv_fp8_e4m3>(p, stream);
    case DType::kFloat8E5M2: return run_dims<E, __nv_fp8_e5m2>(p, stream);
    default: return run_dims<E, E>(p, stream);
  }
}

}  // namespace

void prefill_sm80(const PrefillParams& p, cudaStream_t stream) {
  if (p.query_dtype == DType::kFloat16) return run_kv<__half>(p, stream);
  return run_kv<__nv_bfloat16>(p, stream);
}

}  // namespace bicl
