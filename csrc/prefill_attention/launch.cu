#include <stdexcept>
#include <string>

#include "../common/numeric.cuh"
#include "launch.h"
#include "registry.h"

namespace bicl {
namespace {

template <typename E>
void run_sm90(const PrefillParams& p, int num_ctas, cudaStream_t stream) {
  switch (p.pages.padded_head_dim) {
    case 64: return prefill::sm90::run<E, 64>(p, num_ctas, stream);
    case 128: return prefill::sm90::run<E, 128>(p, num_ctas, stream);
    case 192: return prefill::sm90::run<E, 192>(p, num_ctas, stream);
    default: return prefill::sm90::run<E, 256>(p, num_ctas, stream);
  }
}

template <typename E, typename KV>
void run_mma(const PrefillParams& p, cudaStream_t stream) {
  switch (p.pages.padded_head_dim) {
    case 32: return prefill::mma::run<E, KV, 32>(p, stream);
    case 64: return prefill::mma::run<E, KV, 64>(p, stream);
    case 96: return prefill::mma::run<E, KV, 96>(p, stream);
    case 128: return prefill::mma::run<E, KV, 128>(p, stream);
    case 160: return prefill::mma::run<E, KV, 160>(p, stream);
    case 192: return prefill::mma::run<E, KV, 192>(p, stream);
    case 256: return prefill::mma::run<E, KV, 256>(p, stream);
    default:
      throw std::runtime_error("prefill_attention: padded head_dim " + std::to_string(p.pages.padded_head_dim) +
                               " is not compiled in; 32, 64, 96, 128, 160, 192 and 256 are");
  }
}

template <typename E>
void run(const PrefillParams& p, bool sm90, int num_ctas, cudaStream_t stream) {
  if (sm90) return run_sm90<E>(p, num_ctas, stream);
  switch (p.pages.dtype) {
    case DType::kFloat8E4M3: return run_mma<E, __nv_fp8_e4m3>(p, stream);
    case DType::kFloat8E5M2: return run_mma<E, __nv_fp8_e5m2>(p, stream);
    default: return run_mma<E, E>(p, stream);
  }
}

}  // namespace

bool prefill_uses_sm90(const Pages& pages, const DeviceInfo& device) {
  const int d = pages.padded_head_dim;
  return device.major == 9 && element_bytes(pages.dtype) == 2 && pages.page_size == 64 && pages.tile == 64 &&
         (d == 64 || d == 128 || d == 192 || d == 256);
}

void prefill_attention(const PrefillParams& p, bool force_sm80, int device, cudaStream_t stream) {
  const DeviceInfo& info = device_info(device);
  const bool sm90 = !force_sm80 && prefill_uses_sm90(p.pages, info);
  if (p.query_dtype == DType::kFloat16) return run<__half>(p, sm90, info.num_sms, stream);
  return run<__nv_bfloat16>(p, sm90, info.num_sms, stream);
}

}  // namespace bicl
