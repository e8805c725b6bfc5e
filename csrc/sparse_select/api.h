#pragma once

#include "../common/check.h"
#include "../rotate_and_store/api.h"
#include "launch.h"

namespace bicl {

// records uint8 [num_pages, record_bytes]; their size says how many centroids a page has.
inline PageIndex index_of(const TensorView& records, int num_kv_heads, int head_dim, int device) {
  check_cuda(records, "records", device);
  check_shape(records, "records", {-1, -1});
  check_contiguous(records, "records");
  BICL_CHECK(records.dtype().code == kDLUInt && records.dtype().bits == 8) << "records must be uint8";
  BICL_CHECK(reinterpret_cast<uintptr_t>(records.data_ptr()) % 16 == 0) << "records must be 16-byte aligned";
  BICL_CHECK(head_dim > 0 && head_dim % 8 == 0 && head_dim <= 256)
      << "head_dim is " << head_dim << "; a multiple of 8 up to 256 is needed";
  PageIndex index;
  index.records = static_cast<uint8_t*>(records.data_ptr());
  index.row_bytes = (head_dim + 31) / 32 * 16;
  for (index.centroids = 2; index.centroids <= 8; index.centroids *= 2) {
    const int rows = num_kv_heads * index.centroids;
    index.record_bytes = (rows * (index.row_bytes + 6) + 15) / 16 * 16;
    if (records.size(1) == index.record_bytes) return index;
  }
  BICL_CHECK(false) << "records of " << records.size(1) << " bytes do not hold 2, 4 or 8 centroids of " << num_kv_heads
                    << " heads with head_dim " << head_dim;
  return index;
}

inline PageIndex index_of(const TensorView& records, const Pages& pages, int head_dim, int device) {
  BICL_CHECK(records.size(0) == pages.num_pages)
      << "records are of " << records.size(0) << " pages, there are " << pages.num_pages;
  const PageIndex index = index_of(records, pages.num_kv_heads, head_dim, device);
  BICL_CHECK(head_dim <= pages.padded_head_dim)
      << "head_dim is " << head_dim << ", the pages have " << pages.padded_head_dim;
  return index;
}

// pages as PageLayout.shape(); records as above; slots int64 [T].
inline void index_pages_api(TensorView pages, TensorView records, TensorView slots, int64_t page_size,
                            int64_t head_dim, double k_scale, bool pdl) {
  IndexPagesParams p;
  p.pages = pages_of(pages, page_size, k_scale, 1.0);
  const int device = pages.device().device_id;
  p.index = index_of(records, p.pages, static_cast<int>(head_dim), device);
  check_cuda(slots, "slots", device);
  check_shape(slots, "slots", {-1});
  check_int(slots, "slots", 64);
  check_contiguous(slots, "slots");
  BICL_CHECK(k_scale > 0) << "k_scale is " << k_scale << "; a positive number is needed";
  p.slots = static_cast<const int64_t*>(slots.data_ptr());
  p.num_tokens = static_cast<int>(slots.size(0));
  p.head_dim = static_cast<int>(head_dim);
  p.pdl = pdl && device_info(device).major >= 9;
  DeviceGuard guard(device);
  index_pages(p, current_stream(device));
}

// store_kv of one token a sequence, and index_pages, in one launch.
inline void store_and_index_api(TensorView key, TensorView value, TensorView pages, TensorView records,
                                TensorView slots, int64_t page_size, double k_scale, double v_scale, bool pdl,
                                bool choice_follows) {
  const StoreKvParams p = store_params(key, value, pages, slots, page_size, k_scale, v_scale, pdl);
  const int device = pages.device().device_id;
  const PageIndex index = index_of(records, p.pages, p.head_dim, device);
  BICL_CHECK(p.input_dtype == DType::kFloat16 || p.input_dtype == DType::kBFloat16)
      << "key must be float16 or bfloat16";
  BICL_CHECK(p.num_tokens < 65536 && p.pages.num_kv_heads < 65536) << "too many tokens for a decode step";
  DeviceGuard guard(device);
  store_and_index(p, index, choice_follows, current_stream(device));
}

// rotate_and_store of one token a sequence, and index_pages, in one launch. False, and then nothing was done, where
// those do not fit or a KV head's query heads are not whole.
inline bool rotate_store_and_index_api(TensorView query, TensorView key, TensorView value, TensorView cos,
                                       TensorView sin, TensorView pages, TensorView records, TensorView slots,
                                       int64_t page_size, bool pdl, bool choice_follows) {
  const auto p = rotate_and_store_params(query, key, value, cos, sin, pages, slots, page_size, pdl);
  if (!p || p->num_q_heads % p->store.pages.num_kv_heads != 0) return false;
  const int device = pages.device().device_id;
  const PageIndex index = index_of(records, p->store.pages, p->store.head_dim, device);
  BICL_CHECK(p->store.num_tokens < 65536 && p->store.pages.num_kv_heads < 65536) << "too many tokens for a decode step";
  DeviceGuard guard(device);
  rotate_store_and_index(*p, index, choice_follows, current_stream(device));
  return true;
}

inline void set_sequences(TilesParams& p, const TensorView& page_table, const TensorView& cache_seqlens,
                          int64_t num_kv_heads, int64_t page_size, int64_t first, int64_t recent, int device) {
  p.sequences = sequences_of(page_table, cache_seqlens, device);
  p.max_pages = static_cast<int>(page_table.size(1));
  BICL_CHECK(p.max_pages < 65536) << "page_table is " << p.max_pages << " pages wide; 65535 are the most";
  BICL_CHECK(page_size == 32 || page_size == 64) << "page_size is " << page_size << "; 32 or 64 is needed";
  BICL_CHECK(first >= 0 && recent >= 1) << "first is " << first << " and recent " << recent
                                        << "; the last page is always kept";
  p.page_size = static_cast<int>(page_size);
  p.num_kv_heads = static_cast<int>(num_kv_heads);
  p.rule.first = static_cast<int>(first);
  p.rule.recent = static_cast<int>(recent);
  p.num_sms = device_info(device).num_sms;
}

inline void set_query(TilesParams& p, const TensorView& query, const TensorView& records, const TensorView& weights,
                      double scale, int device) {
  check_cuda(query, "query", device);
  check_shape(query, "query", {p.sequences.batch, -1, -1});
  check_rows(query, "query");
  p.query_dtype = dtype_of(query, "query");
  BICL_CHECK(p.query_dtype == DType::kFloat16 || p.query_dtype == DType::kBFloat16)
      << "query must be float16 or bfloat16";
  p.head_dim = static_cast<int>(query.size(2));
  p.index = index_of(records, p.num_kv_heads, p.head_dim, device);
  check_cuda(weights, "weights", device);
  check_shape(weights, "weights", {1, p.head_dim});
  check_contiguous(weights, "weights");
  BICL_CHECK(dtype_of(weights, "weights") == DType::kFloat32) << "weights must be float32";
  BICL_CHECK(reinterpret_cast<uintptr_t>(weights.data_ptr()) % 16 == 0) << "weights must be 16-byte aligned";
  p.weights = static_cast<const float*>(weights.data_ptr());
  p.num_q_heads = static_cast<int>(query.size(1));
  BICL_CHECK(p.num_q_heads > 0 && p.num_q_heads % p.num_kv_heads == 0)
      << p.num_q_heads << " query heads do not divide among " << p.num_kv_heads << " KV heads";
  BICL_CHECK(scale > 0 && scale < 1e30) << "scale is " << scale << "; a positive finite number is needed";
  p.scale = static_cast<float>(scale);
  p.query = query.data_ptr();
  p.query_token_stride = query.stride(0);
  p.query_head_stride = query.stride(1);
  check_aligned_rows(query, "query", 8);
}

inline Combine combine_of(int64_t combine) {
  BICL_CHECK(combine >= 0 && combine <= 2) << "combine is " << combine << "; 0 (max), 1 (sum) or 2 (softmax) is needed";
  return static_cast<Combine>(combine);
}

inline float* scores_of(const TilesParams& p, const TensorView& scores, int device) {
  check_cuda(scores, "scores", device);
  check_shape(scores, "scores", {p.sequences.batch, p.num_q_heads, p.max_pages});
  check_contiguous(scores, "scores");
  BICL_CHECK(dtype_of(scores, "scores") == DType::kFloat32) << "scores must be float32";
  return static_cast<float*>(scores.data_ptr());
}

inline void set_selection(TilesParams& p, const TensorView& selected, const TensorView& selected_seqlens,
                          const Optional<TensorView>& positions, const TensorView& sparsity, double share,
                          int64_t max_k, int64_t floor, int device) {
  const auto table = [&](const TensorView& t, const char* name) {
    check_cuda(t, name, device);
    check_int(t, name, 32);
    check_shape(t, name, {p.sequences.batch, p.num_kv_heads, p.max_pages});
    check_contiguous(t, name);
    return static_cast<int32_t*>(t.data_ptr());
  };
  p.selected = table(selected, "selected");
  p.positions = positions.has_value() ? table(positions.value(), "positions") : nullptr;
  check_cuda(selected_seqlens, "selected_seqlens", device);
  check_int(selected_seqlens, "selected_seqlens", 32);
  check_shape(selected_seqlens, "selected_seqlens", {p.sequences.batch});
  check_contiguous(selected_seqlens, "selected_seqlens");
  p.selected_seqlens = static_cast<int32_t*>(selected_seqlens.data_ptr());
  check_cuda(sparsity, "sparsity", device);
  check_shape(sparsity, "sparsity", {p.sequences.batch});
  check_contiguous(sparsity, "sparsity");
  BICL_CHECK(dtype_of(sparsity, "sparsity") == DType::kFloat32) << "sparsity must be float32";
  p.sparsity = static_cast<const float*>(sparsity.data_ptr());
  BICL_CHECK(share >= 0 && share < 1e30) << "share is " << share << "; a finite number of at least 0 is needed";
  p.share = static_cast<float>(share);
  BICL_CHECK(max_k >= p.rule.first + p.rule.recent)
      << "max_k is " << max_k << "; the first and recent pages alone are " << p.rule.first + p.rule.recent;
  p.rule.max_k = static_cast<int>(max_k);
  p.rule.floor = static_cast<int>(floor);
}

// scores float32 [B, num_q_heads, max_pages]: what stands at a sequence's last page, or past it, means nothing.
inline void score_tiles_api(TensorView scores, TensorView query, TensorView records, TensorView weights,
                            TensorView page_table, TensorView cache_seqlens, int64_t num_kv_heads, int64_t page_size,
                            double scale, bool pdl) {
  TilesParams p = {};
  const int device = records.device().device_id;
  set_sequences(p, page_table, cache_seqlens, num_kv_heads, page_size, 0, 1, device);
  set_query(p, query, records, weights, scale, device);
  p.scores = scores_of(p, scores, device);
  p.pdl = pdl;
  p.late_input = true;
  DeviceGuard guard(device);
  score_tiles(p, device, current_stream(device));
}

// selected, positions int32 [B, H, max_pages]; selected_seqlens int32 [B]; sparsity float32 [B]; scores as above.
inline void select_tiles_api(TensorView selected, TensorView selected_seqlens, Optional<TensorView> positions,
                             TensorView scores, TensorView page_table, TensorView cache_seqlens, TensorView sparsity,
                             int64_t page_size, int64_t max_k, int64_t first, int64_t recent, int64_t floor,
                             int64_t combine, bool pdl) {
  TilesParams p = {};
  const int device = scores.device().device_id;
  BICL_CHECK(scores.ndim() == 3) << "scores must have shape [B, num_q_heads, max_pages]";
  BICL_CHECK(selected.ndim() == 3) << "selected must have shape [B, H, max_pages]";
  set_sequences(p, page_table, cache_seqlens, selected.size(1), page_size, first, recent, device);
  set_selection(p, selected, selected_seqlens, positions, sparsity, 1.0, max_k, floor, device);
  p.num_q_heads = static_cast<int>(scores.size(1));
  BICL_CHECK(p.num_kv_heads > 0 && p.num_q_heads % p.num_kv_heads == 0)
      << p.num_q_heads << " query heads do not divide among " << p.num_kv_heads << " KV heads";
  p.scores = scores_of(p, scores, device);
  p.combine = combine_of(combine);
  p.pdl = pdl;
  p.late_input = true;
  DeviceGuard guard(device);
  select_tiles(p, device, current_stream(device));
}

// Both at once. pdl: 0 off; 1: the kernel ahead, and the one ahead of that, write nothing that is read but the query and
// the newest pages' index; 2: they may write anything.
inline void choose_tiles_api(TensorView selected, TensorView selected_seqlens, Optional<TensorView> positions,
                             TensorView query, TensorView records, TensorView weights, TensorView page_table,
                             TensorView cache_seqlens, TensorView sparsity, double share, int64_t page_size,
                             int64_t max_k, int64_t first, int64_t recent, int64_t floor, int64_t combine, double scale, int64_t pdl,
                             int64_t force_cluster) {
  TilesParams p = {};
  const int device = records.device().device_id;
  BICL_CHECK(selected.ndim() == 3) << "selected must have shape [B, H, max_pages]";
  set_sequences(p, page_table, cache_seqlens, selected.size(1), page_size, first, recent, device);
  set_query(p, query, records, weights, scale, device);
  set_selection(p, selected, selected_seqlens, positions, sparsity, share, max_k, floor, device);
  p.combine = combine_of(combine);
  p.pdl = pdl > 0;
  p.late_input = pdl > 1;
  BICL_CHECK(force_cluster >= 0 && force_cluster <= 8) << "force_cluster is " << force_cluster << "; 0 to 8 are possible";
  p.force_cluster = static_cast<int>(force_cluster);
  DeviceGuard guard(device);
  choose_tiles(p, device, current_stream(device));
}

}  // namespace bicl
