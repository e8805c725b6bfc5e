#pragma once

#include "../common/check.h"
#include "launch.h"

namespace bicl {

// out [T, I] = silu(gate) * up; gate_up [T, 2 I]: a row's gates, then its ups. One dtype.
inline void swiglu_api(TensorView out, TensorView gate_up, bool pdl) {
  SwigluParams p;
  BICL_CHECK(out.device().device_type == kDLCUDA) << "out must be on a CUDA device";
  const int device = out.device().device_id;
  check_shape(out, "out", {-1, -1});
  check_shape(gate_up, "gate_up", {out.size(0), 2 * out.size(1)});
  check_cuda(gate_up, "gate_up", device);
  check_rows(out, "out");
  check_rows(gate_up, "gate_up");
  p.dtype = dtype_of(out, "out");
  BICL_CHECK(p.dtype == DType::kFloat16 || p.dtype == DType::kBFloat16) << "out must be float16 or bfloat16";
  BICL_CHECK(dtype_of(gate_up, "gate_up") == p.dtype) << "gate_up must have the dtype of out";
  p.out = out.data_ptr();
  p.gate_up = gate_up.data_ptr();
  p.out_stride = out.stride(0);
  p.gate_up_stride = gate_up.stride(0);
  p.num_tokens = out.size(0);
  p.width = static_cast<int>(out.size(1));
  p.pdl = pdl && device_info(device).major >= 9;
  DeviceGuard guard(device);
  swiglu(p, current_stream(device));
}

}  // namespace bicl
