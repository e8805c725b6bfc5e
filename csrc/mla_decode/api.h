#pragma once

#include "../common/check.h"
#include "launch.h"

namespace bicl {

// Views one layer's latent pages, [num_pages, 1, 1, 9, 64, 64], of pages of 64 tokens.
inline void check_latent_pages(const TensorView& pages) {
  BICL_CHECK(pages.device().device_type == kDLCUDA) << "pages must be on a CUDA device";
  check_shape(pages, "pages", {-1, 1, 1, kLatentDim / 64, 64, 64});
  check_contiguous(pages, "pages");
  const DType dtype = dtype_of(pages, "pages");
  BICL_CHECK(dtype == DType::kFloat16 || dtype == DType::kBFloat16) << "pages must be float16 or bfloat16";
  BICL_CHECK(reinterpret_cast<uintptr_t>(pages.data_ptr()) % 128 == 0) << "pages must be 128-byte aligned";
}

// query [B, num_heads, 576], out [B, num_heads, 512], of the pages' dtype; lse float32 [num_heads, B] or None;
// page_table int32 [B, max_pages]; workspace float32, mla_workspace_bytes(); counters int32, mla_num_counters(), zero.
// Neither of the last two may be shared by two streams. pdl: start before the kernel ahead has ended; it is waited for
// before anything is read.
inline void mla_decode_api(TensorView out, Optional<TensorView> lse, TensorView query, TensorView pages,
                           TensorView page_table, TensorView cache_seqlens, TensorView workspace, TensorView counters,
                           double scale, bool pdl) {
  check_latent_pages(pages);
  MlaDecodeParams p = {};
  const int device = pages.device().device_id;
  p.pages = pages.data_ptr();
  p.dtype = dtype_of(pages, "pages");
  p.sequences = sequences_of(page_table, cache_seqlens, device);
  p.table_columns = static_cast<int>(page_table.size(1));
  BICL_CHECK(p.sequences.batch <= kMlaMaxBatch)
      << "a step has " << p.sequences.batch << " sequences; at most " << kMlaMaxBatch << " are allowed";
  set_rows(p, out, lse, query, p.sequences.batch, kLatentDim, kValueDim, 4, device);
  BICL_CHECK(dtype_of(query, "query") == p.dtype) << "query must have the pages' dtype";
  p.num_heads = static_cast<int>(query.size(1));
  check_cuda(workspace, "workspace", device);
  check_contiguous(workspace, "workspace");
  BICL_CHECK(dtype_of(workspace, "workspace") == DType::kFloat32) << "workspace must be float32";
  check_cuda(counters, "counters", device);
  check_int(counters, "counters", 32);
  p.workspace = static_cast<float*>(workspace.data_ptr());
  p.workspace_bytes = workspace.numel() * static_cast<int64_t>(sizeof(float));
  p.counters = static_cast<int32_t*>(counters.data_ptr());
  p.num_counters = static_cast<int>(counters.numel());
  BICL_CHECK(scale > 0 && scale < 1e30) << "scale is " << scale << "; a positive finite number is needed";
  p.scale = static_cast<float>(scale);
  p.pdl = pdl;
  DeviceGuard guard(device);
  mla_decode(p, device, current_stream(device));
}

}  // namespace bicl
