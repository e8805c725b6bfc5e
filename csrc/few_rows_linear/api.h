#pragma once

#include "../common/check.h"
#include "launch.h"

namespace bicl {

// out [T, N] = x [T, K] weight [N, K]^T + bias [N]; with `add` on top of what out holds. One dtype.
inline void few_rows_linear_api(TensorView out, TensorView x, TensorView weight, Optional<TensorView> bias, bool add,
                                bool pdl) {
  FewRowsLinearParams p;
  BICL_CHECK(weight.device().device_type == kDLCUDA) << "weight must be on a CUDA device";
  const int device = weight.device().device_id;
  check_shape(x, "x", {-1, -1});
  check_shape(weight, "weight", {-1, x.size(1)});
  check_shape(out, "out", {x.size(0), weight.size(0)});
  p.dtype = dtype_of(weight, "weight");
  BICL_CHECK(p.dtype == DType::kFloat16 || p.dtype == DType::kBFloat16) << "weight must be float16 or bfloat16";
  const auto check = [&](const TensorView& t, const char* name) {
    check_cuda(t, name, device);
    check_rows(t, name);
    BICL_CHECK(dtype_of(t, name) == p.dtype) << name << " must have the dtype of weight";
  };
  check(out, "out");
  check(x, "x");
  check(weight, "weight");
  p.bias = nullptr;
  if (bias.has_value()) {
    check(bias.value(), "bias");
    check_shape(bias.value(), "bias", {weight.size(0)});
    p.bias = bias.value().data_ptr();
  }
  BICL_CHECK(x.size(0) <= kFewRows) << "x has " << x.size(0) << " rows; " << kFewRows << " are the most";
  BICL_CHECK(x.size(1) % 64 == 0 && x.size(1) > 0 && weight.size(0) % 16 == 0)
      << "weight has shape [" << weight.size(0) << ", " << x.size(1) << "]; multiples of 16 and 64 are needed";
  p.out = out.data_ptr();
  p.x = x.data_ptr();
  p.weight = weight.data_ptr();
  p.out_stride = out.stride(0);
  p.x_stride = x.stride(0);
  p.weight_stride = weight.stride(0);
  check_aligned_rows(x, "x", 8);
  check_aligned_rows(weight, "weight", 8);
  p.num_rows = static_cast<int>(x.size(0));
  p.num_outputs = static_cast<int>(weight.size(0));
  p.depth = static_cast<int>(x.size(1));
  p.add = add;
  p.pdl = pdl && device_info(device).major >= 9;
  DeviceGuard guard(device);
  few_rows_linear(p, current_stream(device));
}

}  // namespace bicl
