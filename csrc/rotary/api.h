#pragma once

#include "../common/check.h"
#include "launch.h"

namespace bicl {

// query [T, Hq, D], key [T, H, D], in place; cos, sin [T, R], R <= D: of the first R dims of a head. One dtype.
inline void rotate_api(TensorView query, TensorView key, TensorView cos, TensorView sin, bool pdl) {
  RotaryParams p;
  BICL_CHECK(query.device().device_type == kDLCUDA) << "query must be on a CUDA device";
  const int device = query.device().device_id;
  check_shape(query, "query", {-1, -1, -1});
  check_shape(key, "key", {query.size(0), -1, query.size(2)});
  check_shape(cos, "cos", {query.size(0), -1});
  check_shape(sin, "sin", {query.size(0), cos.size(1)});
  p.dtype = dtype_of(query, "query");
  BICL_CHECK(p.dtype == DType::kFloat16 || p.dtype == DType::kBFloat16) << "query must be float16 or bfloat16";
  for (const auto& [t, name] :
       {std::pair<const TensorView&, const char*>{query, "query"}, {key, "key"}, {cos, "cos"}, {sin, "sin"}}) {
    check_cuda(t, name, device);
    check_rows(t, name);
    BICL_CHECK(dtype_of(t, name) == p.dtype) << name << " must have the query's dtype";
  }
  p.rotary_dim = static_cast<int>(cos.size(1));
  BICL_CHECK(p.rotary_dim > 0 && p.rotary_dim % 2 == 0 && p.rotary_dim <= query.size(2))
      << "cos rotates " << p.rotary_dim << " of " << query.size(2) << " dims; an even number of them is needed";
  p.query = query.data_ptr();
  p.key = key.data_ptr();
  p.cos = cos.data_ptr();
  p.sin = sin.data_ptr();
  p.query_token_stride = query.stride(0);
  p.query_head_stride = query.stride(1);
  p.key_token_stride = key.stride(0);
  p.key_head_stride = key.stride(1);
  p.cos_stride = cos.stride(0);
  p.sin_stride = sin.stride(0);
  p.num_tokens = static_cast<int>(query.size(0));
  p.num_q_heads = static_cast<int>(query.size(1));
  p.num_kv_heads = static_cast<int>(key.size(1));
  p.pdl = pdl && device_info(device).major >= 9;
  DeviceGuard guard(device);
  rotate(p, current_stream(device));
}

}  // namespace bicl
