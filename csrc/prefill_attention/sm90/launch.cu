#include <stdexcept>
#include <string>

#include "../../common/numeric.cuh"
#include "../launch.h"

namespace bicl {
namespace prefill::sm90 {

template <typename E, int D>
void run(const PrefillParams& p, int num_ctas, cudaStream_t stream);  // one file each

template <typename E>
void run_dims(const PrefillParams& p, int num_ctas, cudaStream_t stream) {
  switch (p.pages.padded_head_dim) {
    case 64: return run<E, 64>(p, num_ctas, stream);
    case 128: return run<E, 128>(p, num_ctas, stream);
    case 192: return run<E, 192>(p, num_ctas, stream);
    case 256: return run<E, 256>(p, num_ctas, stream);
    default:
      throw std::logic_error("prefill_sm90: no kernel for head_dim " + std::to_string(p.pages.padded_head_dim));
  }
}

}  // namespace prefill::sm90

bool prefill_uses_sm90(const Pages& pages, DType query_dtype, const DeviceInfo& device) {
  const int d = pages.padded_head_dim;
  return device.major == 9 && pages.dtype == query_dtype && pages.page_size == 64 && pages.tile == 64 &&
         (d == 64 || d == 128 || d == 192 || d == 256);
}

void prefill_sm90(const PrefillParams& p, int num_ctas, cudaStream_t stream) {
  if (p.query_dtype == DType::kFloat16) return prefill::sm90::run_dims<__half>(p, num_ctas, stream);
  return prefill::sm90::run_dims<__nv_bfloat16>(p, num_ctas, stream);
}

}  // namespace bicl
