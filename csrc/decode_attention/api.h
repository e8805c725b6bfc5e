#pragma once

#include "../common/check.h"
#include "launch.h"

namespace bicl {

// What all calls on one layer have in common.
struct DecodeLayer {
  DecodeParams params;
  int device;
};

// workspace: uint8 of decode_workspace_bytes(); counters: int32, at least B * kv heads * ceil(group / 16), zero.
// Neither may be shared by two streams.
inline DecodeLayer decode_layer(TensorView pages, int64_t page_size, double k_scale, double v_scale,
                                TensorView workspace, TensorView counters, double scale, double softcap,
                                int64_t window_left, bool deterministic, bool force_sm80, int64_t force_cluster,
                                int64_t force_grid) {
  DecodeLayer layer;
  DecodeParams& p = layer.params;
  p.pages = pages_of(pages, page_size, k_scale, v_scale);
  layer.device = pages.device().device_id;
  BICL_CHECK(k_scale > 0 && v_scale > 0) << "k_scale " << k_scale << " and v_scale " << v_scale
                                         << " must be positive";
  check_cuda(workspace, "workspace", layer.device);
  check_cuda(counters, "counters", layer.device);
  check_int(counters, "counters", 32);
  p.workspace = workspace.data_ptr();
  p.workspace_bytes = workspace.numel();
  p.counters = static_cast<int32_t*>(counters.data_ptr());
  p.num_counters = static_cast<int>(counters.numel());
  p.num_sms = device_info(layer.device).num_sms;
  BICL_CHECK(scale > 0 && scale < 1e30) << "scale is " << scale << "; a positive finite number is needed";
  BICL_CHECK(softcap >= 0 && softcap < 1e30) << "softcap is " << softcap << "; use 0 (off) or a positive number";
  p.scale = static_cast<float>(scale);
  p.softcap = static_cast<float>(softcap);
  p.window_left = static_cast<int>(window_left);
  p.deterministic = deterministic;
  p.force_sm80 = force_sm80;
  p.force_cluster = static_cast<int>(force_cluster);
  p.force_grid = static_cast<int>(force_grid);
  return layer;
}

// out, query [B, num_q_heads, head_dim] of one 16-bit dtype; lse float32 [num_q_heads, B] or None.
// page_table [B, max_pages], or [B, kv heads, max_pages]: other pages for each KV head, as many for all.
// plan: of plan_decode() for this table and these lengths, heads, dtype and options, or None.
// pdl: 0 off; 1: the kernel ahead may still be writing the query and each sequence's newest token; 2: and the table,
// which a plan would have read; 3: and the lengths.
inline void decode_call(const DecodeLayer& layer, TensorView out, Optional<TensorView> lse, TensorView query,
                        TensorView page_table, TensorView cache_seqlens, Optional<TensorView> plan, int64_t pdl) {
  DecodeParams p = layer.params;
  const int device = layer.device;
  p.sequences = sequences_of(page_table, cache_seqlens, device, p.pages.num_kv_heads);
  set_paged_rows(p, out, lse, query, p.sequences.batch, 4, device);
  p.pdl = pdl > 0;
  p.late_table = pdl > 1;
  p.late_lengths = pdl > 2;
  BICL_CHECK(pdl != 2 || !plan.has_value()) << "a plan has read the page table: pdl must be 1 or 3, not 2";
  DeviceGuard guard(device);
  const void* planned = nullptr;
  int64_t plan_bytes = 0;
  if (plan.has_value()) {
    check_cuda(plan.value(), "plan", device);
    planned = plan.value().data_ptr();
    plan_bytes = plan.value().numel();
  }
  decode_attention(p, planned, plan_bytes, device, current_stream(device));
}

// Makes the plan of a step in `plan`, uint8 of decode_plan_bytes(), 16-byte aligned. Good for every layer with these
// heads, this dtype, window and page table, until they or the lengths change.
inline void plan_decode_api(TensorView plan, TensorView pages, int64_t page_size, TensorView page_table,
                            TensorView cache_seqlens, int64_t num_q_heads, int64_t window_left, bool deterministic,
                            bool pdl, bool force_sm80, int64_t force_cluster, int64_t force_grid) {
  const int device = pages.device().device_id;
  DecodeParams p = {};
  p.pages = pages_of(pages, page_size, 1.0, 1.0);
  p.sequences = sequences_of(page_table, cache_seqlens, device, p.pages.num_kv_heads);
  BICL_CHECK(num_q_heads > 0 && num_q_heads % p.pages.num_kv_heads == 0)
      << num_q_heads << " query heads do not divide among " << p.pages.num_kv_heads << " KV heads";
  p.num_q_heads = static_cast<int>(num_q_heads);
  p.window_left = static_cast<int>(window_left);
  p.deterministic = deterministic;
  p.pdl = pdl;
  p.num_sms = device_info(device).num_sms;
  p.force_sm80 = force_sm80;
  p.force_cluster = static_cast<int>(force_cluster);
  p.force_grid = static_cast<int>(force_grid);
  check_cuda(plan, "plan", device);
  check_contiguous(plan, "plan");
  DeviceGuard guard(device);
  plan_decode(p, plan.data_ptr(), plan.numel(), device, current_stream(device));
}

// decode_call() for one layer: what does not change from step to step is handed over and checked once, which spares
// the host a fifth of a launch. The pages, the workspace and the counters must outlive the function.
inline tvm::ffi::Function bind_decode_attention(TensorView pages, int64_t page_size, double k_scale, double v_scale,
                                                TensorView workspace, TensorView counters, double scale,
                                                double softcap, int64_t window_left, bool deterministic,
                                                bool force_sm80, int64_t force_cluster, int64_t force_grid) {
  const DecodeLayer layer = decode_layer(pages, page_size, k_scale, v_scale, workspace, counters, scale, softcap,
                                         window_left, deterministic, force_sm80, force_cluster, force_grid);
  return tvm::ffi::Function::FromTyped(
      [layer](TensorView out, Optional<TensorView> lse, TensorView query, TensorView page_table,
              TensorView cache_seqlens, Optional<TensorView> plan, int64_t pdl) {
        decode_call(layer, out, lse, query, page_table, cache_seqlens, plan, pdl);
      });
}

}  // namespace bicl
