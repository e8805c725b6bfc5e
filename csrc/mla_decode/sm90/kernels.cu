#include "mla_decode/kernel.cuh"
#include "mla_decode/registry.h"

namespace bicl::mla {
namespace {

template <typename Element, int kHeads>
Kernel kernel(DType dtype) {
  using T = Traits<Element, kHeads>;
  return {dtype, kHeads, kernel_ref<decode_kernel<Element, kHeads>>(), T::kThreads, T::kSharedBytes};
}

const Registration registrations[] = {
    Registration(kernel<__nv_bfloat16, 16>(DType::kBFloat16)), Registration(kernel<__nv_bfloat16, 32>(DType::kBFloat16)),
    Registration(kernel<__nv_bfloat16, 64>(DType::kBFloat16)), Registration(kernel<__half, 16>(DType::kFloat16)),
    Registration(kernel<__half, 32>(DType::kFloat16)),         Registration(kernel<__half, 64>(DType::kFloat16)),
};

}  // namespace
}  // namespace bicl::mla
