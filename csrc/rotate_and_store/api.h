#pragma once

#include <optional>

#include "../common/check.h"
#include "../store_kv/api.h"
#include "launch.h"

namespace bicl {

// query [T, Hq, D], in place; key, value and slots as for store_kv; cos, sin [T, R]: of the first R dims of a head.
// Nothing unless all are of the pages' own 16-bit dtype, D is the pages' padded_head_dim, R a multiple of 16, and rows
// begin at multiples of 16 bytes.
inline std::optional<RotateAndStoreParams> rotate_and_store_params(
    const TensorView& query, const TensorView& key, const TensorView& value, const TensorView& cos,
    const TensorView& sin, const TensorView& pages, const TensorView& slots, int64_t page_size, bool pdl) {
  RotateAndStoreParams p;
  p.store = store_params(key, value, pages, slots, page_size, 1.0, 1.0, pdl);
  const int device = pages.device().device_id;
  check_shape(query, "query", {key.size(0), -1, key.size(2)});
  check_shape(cos, "cos", {key.size(0), -1});
  check_shape(sin, "sin", {key.size(0), cos.size(1)});
  for (const auto& [t, name] : {std::pair<const TensorView&, const char*>{query, "query"}, {cos, "cos"}, {sin, "sin"}}) {
    check_cuda(t, name, device);
    check_rows(t, name);
    if (dtype_of(t, name) != p.store.pages.dtype) return std::nullopt;
  }
  if (p.store.input_dtype != p.store.pages.dtype || element_bytes(p.store.pages.dtype) != 2 ||
      p.store.head_dim != p.store.pages.padded_head_dim || cos.size(1) % 16 != 0)
    return std::nullopt;
  p.query = query.data_ptr();
  p.cos = cos.data_ptr();
  p.sin = sin.data_ptr();
  p.query_token_stride = query.stride(0);
  p.query_head_stride = query.stride(1);
  p.cos_stride = cos.stride(0);
  p.sin_stride = sin.stride(0);
  p.num_q_heads = static_cast<int>(query.size(1));
  p.rotary_dim = static_cast<int>(cos.size(1));
  BICL_CHECK(p.rotary_dim > 0 && p.rotary_dim <= p.store.head_dim)
      << "cos rotates " << p.rotary_dim << " of " << p.store.head_dim << " dims";
  const int64_t strides = p.query_token_stride | p.query_head_stride | p.cos_stride | p.sin_stride |
                          p.store.key_token_stride | p.store.key_head_stride | p.store.value_token_stride |
                          p.store.value_head_stride;
  uintptr_t addresses = 0;
  for (const void* data : {static_cast<const void*>(p.query), p.cos, p.sin, p.store.key, p.store.value})
    addresses |= reinterpret_cast<uintptr_t>(data);
  if (strides % 8 != 0 || addresses % 16 != 0) return std::nullopt;
  return p;
}

// False, and then nothing was done, where there are no such parameters.
inline bool rotate_and_store_api(TensorView query, TensorView key, TensorView value, TensorView cos, TensorView sin,
                                 TensorView pages, TensorView slots, int64_t page_size, bool pdl) {
  const auto p = rotate_and_store_params(query, key, value, cos, sin, pages, slots, page_size, pdl);
  if (!p) return false;
  const int device = pages.device().device_id;
  DeviceGuard guard(device);
  rotate_and_store(*p, current_stream(device));
  return true;
}

}  // namespace bicl
