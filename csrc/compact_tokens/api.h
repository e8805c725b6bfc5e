#pragma once

#include "../common/check.h"
#include "launch.h"

namespace bicl {

// source, target: pages of one layout, disjoint or in different pools. page_table int32 [max_pages] of the source;
// positions int32 [H, n]; target_pages int32 [>= ceil(n / P)].
inline void compact_tokens_api(TensorView source, TensorView page_table, TensorView positions, TensorView target,
                               TensorView target_pages, int64_t page_size) {
  CompactTokensParams p;
  p.source = pages_of(source, page_size, 1.0, 1.0);
  p.target = pages_of(target, page_size, 1.0, 1.0);
  const int device = source.device().device_id;
  check_cuda(target, "target", device);
  check_shape(target, "target", {-1, p.source.num_kv_heads, 2, source.size(3), p.source.tile, p.source.tile});
  BICL_CHECK(p.source.dtype == p.target.dtype) << "source and target must have one dtype";
  for (const auto& [t, name] : {std::pair<const TensorView&, const char*>{page_table, "page_table"},
                                {positions, "positions"},
                                {target_pages, "target_pages"}}) {
    check_cuda(t, name, device);
    check_int(t, name, 32);
    check_rows(t, name);
  }
  check_shape(page_table, "page_table", {-1});
  check_shape(positions, "positions", {p.source.num_kv_heads, -1});
  check_shape(target_pages, "target_pages", {-1});
  const int64_t tokens = positions.size(1), needed = (tokens + page_size - 1) / page_size;
  BICL_CHECK(target_pages.size(0) >= needed)
      << tokens << " tokens need " << needed << " pages; target_pages has " << target_pages.size(0);
  p.page_table = static_cast<const int32_t*>(page_table.data_ptr());
  p.positions = static_cast<const int32_t*>(positions.data_ptr());
  p.target_pages = static_cast<const int32_t*>(target_pages.data_ptr());
  p.positions_stride = positions.stride(0);
  p.num_tokens = static_cast<int>(tokens);
  DeviceGuard guard(device);
  compact_tokens(p, current_stream(device));
}

}  // namespace bicl
