#pragma once

#include "../common/check.h"
#include "launch.h"

namespace bicl {

inline PrefillWindow prefill_window(int64_t left, int64_t right, bool causal) {
  BICL_CHECK(left >= -1 && right >= -1) << "window (" << left << ", " << right << "): sizes are counts, or -1 for all";
  const auto size = [](int64_t n) { return n < 0 || n > kUnlimited ? kUnlimited : static_cast<int>(n); };
  return {size(left), causal ? 0 : size(right)};
}

inline PrefillPlan prefill_plan_of(const TensorView& workspace, int64_t num_tokens, int64_t batch, int64_t group,
                                   int64_t padded_head_dim, int device) {
  check_cuda(workspace, "workspace", device);
  check_contiguous(workspace, "workspace");
  const int num_ctas = device_info(device).num_sms;
  const int64_t bytes = prefill_workspace_bytes(num_tokens, batch, group, padded_head_dim, num_ctas);
  BICL_CHECK(workspace.numel() >= bytes) << "workspace has " << workspace.numel() << " bytes; " << bytes
                                         << " are needed for " << num_tokens << " tokens in " << batch
                                         << " sequences";
  return plan_view(workspace.data_ptr(), num_tokens, batch, group, padded_head_dim, num_ctas);
}

// Bytes of workspace (uint8, 256-byte aligned) for one plan of at most so many query tokens and sequences.
inline int64_t prefill_workspace_bytes_api(int64_t num_tokens, int64_t batch, int64_t group, int64_t padded_head_dim,
                                           int64_t device) {
  return prefill_workspace_bytes(num_tokens, batch, group, padded_head_dim, device_info(device).num_sms);
}

// Whether prefill multiplies these pages with wgmma (whose tiles are as long as the page: of 64 tokens or of 32);
// otherwise with mma.sync, at a quarter to a half of the speed.
inline bool prefill_uses_wgmma_api(TensorView pages, int64_t page_size) {
  return prefill_uses_sm90(pages_of(pages, page_size, 1.0, 1.0), device_info(pages.device().device_id));
}

// Makes the tile list of a step in `workspace`: cu_seqlens_q int32 [B + 1], cache_seqlens int32 [B]. Good for every
// layer with these heads, dims and window, until the lengths change.
inline void plan_prefill_api(TensorView workspace, TensorView pages, TensorView cu_seqlens_q, TensorView cache_seqlens,
                             int64_t page_size, int64_t num_tokens, int64_t num_q_heads, int64_t window_left,
                             int64_t window_right, bool causal, bool deterministic, bool force_sm80) {
  const Pages view = pages_of(pages, page_size, 1.0, 1.0);
  const int device = pages.device().device_id;
  check_cuda(cu_seqlens_q, "cu_seqlens_q", device);
  check_cuda(cache_seqlens, "cache_seqlens", device);
  check_int(cu_seqlens_q, "cu_seqlens_q", 32);
  check_int(cache_seqlens, "cache_seqlens", 32);
  check_contiguous(cu_seqlens_q, "cu_seqlens_q");
  check_contiguous(cache_seqlens, "cache_seqlens");
  const int64_t batch = cache_seqlens.size(0);
  check_shape(cu_seqlens_q, "cu_seqlens_q", {batch + 1});
  BICL_CHECK(num_q_heads > 0 && num_q_heads % view.num_kv_heads == 0)
      << num_q_heads << " query heads do not divide among " << view.num_kv_heads << " KV heads";
  const DeviceInfo& info = device_info(device);
  const int64_t group = num_q_heads / view.num_kv_heads;
  PrefillPlanParams p;
  p.cu_seqlens_q = static_cast<const int32_t*>(cu_seqlens_q.data_ptr());
  p.cache_seqlens = static_cast<const int32_t*>(cache_seqlens.data_ptr());
  p.plan = prefill_plan_of(workspace, num_tokens, batch, group, view.padded_head_dim, device);
  p.window = prefill_window(window_left, window_right, causal);
  p.group = FastDiv(group);
  p.batch = static_cast<int>(batch);
  p.num_kv_heads = view.num_kv_heads;
  p.padded_head_dim = view.padded_head_dim;
  p.kv_bytes = 2 * view.padded_head_dim * element_bytes(view.dtype);
  p.num_ctas = info.num_sms;
  // The sm_80 kernel takes whole tiles only; it runs where the Hopper kernel does not fit the pages.
  p.allow_split = !deterministic && !force_sm80 && prefill_uses_sm90(view, info);
  DeviceGuard guard(device);
  plan_prefill(p, current_stream(device));
}

// out, query [T, num_q_heads, head_dim] of one 16-bit dtype; lse float32 [num_q_heads, T] or None. `workspace` holds
// the plan of this step, made with the same T, heads, window and force_sm80.
inline void prefill_attention_api(TensorView out, Optional<TensorView> lse, TensorView query, TensorView pages,
                                  TensorView page_table, TensorView cache_seqlens, TensorView workspace,
                                  int64_t page_size, double k_scale, double v_scale, double scale, double softcap,
                                  int64_t window_left, int64_t window_right, bool causal, bool pdl, bool force_sm80) {
  PrefillParams p;
  p.pages = pages_of(pages, page_size, k_scale, v_scale);
  const int device = pages.device().device_id;
  p.sequences = sequences_of(page_table, cache_seqlens, device);
  set_paged_rows(p, out, lse, query, -1, 8, device);
  p.num_tokens = static_cast<int>(query.size(0));
  BICL_CHECK(scale > 0 && k_scale > 0 && v_scale > 0)
      << "scale " << scale << ", k_scale " << k_scale << " and v_scale " << v_scale << " must be positive";
  BICL_CHECK(softcap >= 0) << "softcap " << softcap << " must be positive, or 0 for none";
  const int64_t group = p.num_q_heads / p.pages.num_kv_heads;
  p.plan = prefill_plan_of(workspace, p.num_tokens, p.sequences.batch, group, p.pages.padded_head_dim, device);
  p.window = prefill_window(window_left, window_right, causal);
  p.group = FastDiv(group);
  p.scale = static_cast<float>(scale);
  p.softcap = static_cast<float>(softcap);
  p.pdl = pdl;
  if (p.num_tokens == 0) return;
  DeviceGuard guard(device);
  prefill_attention(p, force_sm80, device, current_stream(device));
}

}  // namespace bicl
