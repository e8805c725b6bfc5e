#pragma once

#include "../common/check.h"
#include "launch.h"

namespace bicl {

// key, value [T, H, head_dim]; slots int64 [T]; pages as PageLayout.shape().
inline StoreKvParams store_params(const TensorView& key, const TensorView& value, const TensorView& pages,
                                  const TensorView& slots, int64_t page_size, double k_scale, double v_scale,
                                  bool pdl) {
  StoreKvParams p;
  p.pages = pages_of(pages, page_size, k_scale, v_scale);
  const int device = pages.device().device_id;
  check_shape(key, "key", {-1, p.pages.num_kv_heads, -1});
  check_shape(value, "value", {key.size(0), p.pages.num_kv_heads, key.size(2)});
  check_shape(slots, "slots", {key.size(0)});
  check_int(slots, "slots", 64);
  check_contiguous(slots, "slots");
  check_rows(key, "key");
  check_rows(value, "value");
  check_cuda(key, "key", device);
  check_cuda(value, "value", device);
  check_cuda(slots, "slots", device);
  p.input_dtype = dtype_of(key, "key");
  BICL_CHECK(dtype_of(value, "value") == p.input_dtype) << "key and value must have one dtype";
  BICL_CHECK(p.input_dtype == p.pages.dtype || (is_fp8(p.pages.dtype) && !is_fp8(p.input_dtype)))
      << "key and value must have the pages' dtype, or be unquantised where the pages are fp8";
  BICL_CHECK(key.size(2) <= p.pages.padded_head_dim)
      << "head_dim " << key.size(2) << " exceeds the pages' " << p.pages.padded_head_dim;
  BICL_CHECK(k_scale > 0 && v_scale > 0) << "k_scale " << k_scale << " and v_scale " << v_scale
                                         << " must be positive";
  p.key = key.data_ptr();
  p.value = value.data_ptr();
  p.slots = static_cast<const int64_t*>(slots.data_ptr());
  p.key_token_stride = key.stride(0);
  p.key_head_stride = key.stride(1);
  p.value_token_stride = value.stride(0);
  p.value_head_stride = value.stride(1);
  p.num_tokens = static_cast<int>(key.size(0));
  p.head_dim = static_cast<int>(key.size(2));
  p.pdl = pdl && device_info(device).major >= 9;
  return p;
}

inline void store_kv_api(TensorView key, TensorView value, TensorView pages, TensorView slots,
                         int64_t page_size, double k_scale, double v_scale, bool pdl) {
  const StoreKvParams p = store_params(key, value, pages, slots, page_size, k_scale, v_scale, pdl);
  const int device = pages.device().device_id;
  DeviceGuard guard(device);
  store_kv(p, current_stream(device));
}

}  // namespace bicl
