#pragma once

#include "../common/check.h"
#include "launch.h"

namespace bicl {

// out [T, N] = x / sqrt(mean(x^2) + eps) * weight; x [T, N], weight [N]. One dtype.
inline void rms_norm_api(TensorView out, TensorView x, TensorView weight, double eps, bool pdl) {
  RmsNormParams p;
  BICL_CHECK(x.device().device_type == kDLCUDA) << "x must be on a CUDA device";
  const int device = x.device().device_id;
  check_shape(x, "x", {-1, -1});
  check_shape(out, "out", {x.size(0), x.size(1)});
  check_shape(weight, "weight", {x.size(1)});
  p.dtype = dtype_of(x, "x");
  BICL_CHECK(p.dtype == DType::kFloat16 || p.dtype == DType::kBFloat16) << "x must be float16 or bfloat16";
  for (const auto& [t, name] :
       {std::pair<const TensorView&, const char*>{x, "x"}, {out, "out"}, {weight, "weight"}}) {
    check_cuda(t, name, device);
    check_rows(t, name);
    BICL_CHECK(dtype_of(t, name) == p.dtype) << name << " must have the dtype of x";
  }
  BICL_CHECK(eps >= 0) << "eps is " << eps << "; it cannot be negative";
  p.x = x.data_ptr();
  p.out = out.data_ptr();
  p.weight = weight.data_ptr();
  p.x_stride = x.stride(0);
  p.out_stride = out.stride(0);
  p.num_tokens = x.size(0);
  p.width = static_cast<int>(x.size(1));
  p.eps = static_cast<float>(eps);
  p.pdl = pdl && device_info(device).major >= 9;
  DeviceGuard guard(device);
  rms_norm(p, current_stream(device));
}

}  // namespace bicl
