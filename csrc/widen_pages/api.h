#pragma once

#include <algorithm>

#include "../common/check.h"
#include "launch.h"

namespace bicl {

// source: fp8 pages; target: float16 or bfloat16 pages of the same page size, tiles and head_dim, for the KV heads
// first_head, first_head + 1, ... of the source. Page j of sequence b goes to page b * pages_per_sequence + j; those
// from pages_per_sequence on are left out.
inline void widen_pages_api(TensorView target, TensorView source, TensorView page_table, TensorView cache_seqlens,
                            int64_t page_size, int64_t first_head, int64_t pages_per_sequence, bool pdl) {
  WidenPagesParams p;
  p.source = pages_of(source, page_size, 1.0, 1.0);
  p.target = pages_of(target, page_size, 1.0, 1.0);
  const int device = source.device().device_id;
  check_cuda(target, "target", device);
  check_shape(target, "target", {-1, -1, 2, source.size(3), p.source.tile, p.source.tile});
  BICL_CHECK(is_fp8(p.source.dtype)) << "source must be fp8";
  BICL_CHECK(p.target.dtype == DType::kFloat16 || p.target.dtype == DType::kBFloat16)
      << "target must be float16 or bfloat16";
  BICL_CHECK(first_head >= 0 && first_head + p.target.num_kv_heads <= p.source.num_kv_heads)
      << "heads " << first_head << " to " << first_head + p.target.num_kv_heads << " are not among the source's "
      << p.source.num_kv_heads;
  p.sequences = sequences_of(page_table, cache_seqlens, device);
  constexpr int64_t kMost = 65535;  // of a grid's second and third dimension
  BICL_CHECK(pages_per_sequence >= 0 && pages_per_sequence <= std::min(kMost, page_table.size(1)))
      << pages_per_sequence << " pages a sequence; the page table has " << page_table.size(1) << ", and " << kMost
      << " is the most";
  BICL_CHECK(p.sequences.batch <= kMost) << p.sequences.batch << " sequences; " << kMost << " is the most";
  BICL_CHECK(p.sequences.batch * pages_per_sequence <= p.target.num_pages)
      << p.sequences.batch << " sequences of " << pages_per_sequence << " pages do not fit the target's "
      << p.target.num_pages;
  p.first_head = static_cast<int>(first_head);
  p.pages_per_sequence = static_cast<int>(pages_per_sequence);
  p.pdl = pdl;
  DeviceGuard guard(device);
  widen_pages(p, current_stream(device));
}

}  // namespace bicl
