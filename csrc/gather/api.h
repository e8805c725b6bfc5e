#pragma once

#include "../common/check.h"
#include "launch.h"

namespace bicl {

// key, value [sum(cache_seqlens), H, head_dim] contiguous; offsets int64 [B]: first row of each sequence.
inline void gather_api(TensorView key, TensorView value, TensorView pages, TensorView page_table,
                       TensorView cache_seqlens, TensorView offsets, int64_t max_tokens, int64_t page_size,
                       double k_scale, double v_scale) {
  GatherParams p;
  p.pages = pages_of(pages, page_size, k_scale, v_scale);
  const int device = pages.device().device_id;
  p.sequences = sequences_of(page_table, cache_seqlens, device);
  check_shape(key, "key", {-1, p.pages.num_kv_heads, -1});
  check_shape(value, "value", {key.size(0), key.size(1), key.size(2)});
  for (const auto& [tensor, name] : {std::pair<const TensorView&, const char*>{key, "key"}, {value, "value"}}) {
    check_cuda(tensor, name, device);
    check_contiguous(tensor, name);
  }
  p.output_dtype = dtype_of(key, "key");
  BICL_CHECK(dtype_of(value, "value") == p.output_dtype) << "key and value must have one dtype";
  BICL_CHECK(p.output_dtype == p.pages.dtype || (is_fp8(p.pages.dtype) && !is_fp8(p.output_dtype)))
      << "key and value must have the pages' dtype, or be unquantised where the pages are fp8";
  BICL_CHECK(key.size(2) <= p.pages.padded_head_dim)
      << "head_dim " << key.size(2) << " exceeds the pages' " << p.pages.padded_head_dim;
  check_cuda(offsets, "offsets", device);
  check_shape(offsets, "offsets", {p.sequences.batch});
  check_int(offsets, "offsets", 64);
  check_contiguous(offsets, "offsets");
  p.offsets = static_cast<const int64_t*>(offsets.data_ptr());
  p.key = key.data_ptr();
  p.value = value.data_ptr();
  p.head_dim = static_cast<int>(key.size(2));
  p.max_tokens = static_cast<int>(max_tokens);
  DeviceGuard guard(device);
  gather(p, current_stream(device));
}

}  // namespace bicl
