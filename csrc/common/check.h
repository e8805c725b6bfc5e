// Checks on DLPack views, for api.h files only. Messages name the tensor, what was expected and what came.
#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <cuda_runtime.h>

#include <initializer_list>

#include "../params.h"
#include "launch.h"

namespace bicl {

using tvm::ffi::Optional;
using tvm::ffi::TensorView;

#define BICL_CHECK(condition) \
  if (!(condition)) TVM_FFI_THROW(ValueError)

inline DType dtype_of(const TensorView& t, const char* name) {
  const DLDataType d = t.dtype();
  if (d.lanes == 1) {
    if (d.code == kDLFloat && d.bits == 32) return DType::kFloat32;
    if (d.code == kDLFloat && d.bits == 16) return DType::kFloat16;
    if (d.code == kDLBfloat && d.bits == 16) return DType::kBFloat16;
    if (d.code == kDLFloat8_e4m3fn) return DType::kFloat8E4M3;
    if (d.code == kDLFloat8_e5m2) return DType::kFloat8E5M2;
  }
  TVM_FFI_THROW(ValueError) << name << " has dtype code " << int(d.code) << " of " << int(d.bits)
                            << " bits; float32, float16, bfloat16, float8_e4m3fn or float8_e5m2 is needed";
  return DType::kFloat32;
}

inline void check_cuda(const TensorView& t, const char* name, int device) {
  BICL_CHECK(t.device().device_type == kDLCUDA && t.device().device_id == device)
      << name << " is on device type " << int(t.device().device_type) << ":" << t.device().device_id
      << "; it must be on cuda:" << device << " with the pages";
}

inline void check_shape(const TensorView& t, const char* name, std::initializer_list<int64_t> shape) {
  bool same = t.ndim() == static_cast<int>(shape.size());
  int i = 0;
  if (same)
    for (int64_t n : shape) same = same && (n < 0 || t.size(i) == n), ++i;
  if (same) return;
  std::string got, want;
  for (int d = 0; d < t.ndim(); ++d) got += (d ? ", " : "") + std::to_string(t.size(d));
  for (int64_t n : shape) want += (want.empty() ? "" : ", ") + (n < 0 ? std::string("*") : std::to_string(n));
  TVM_FFI_THROW(ValueError) << name << " has shape [" << got << "]; [" << want << "] is needed";
}

inline void check_int(const TensorView& t, const char* name, int bits) {
  BICL_CHECK(t.dtype().code == kDLInt && t.dtype().bits == bits && t.dtype().lanes == 1)
      << name << " must be int" << bits;
}

inline void check_contiguous(const TensorView& t, const char* name) {
  BICL_CHECK(t.IsContiguous()) << name << " must be contiguous";
}

inline void check_rows(const TensorView& t, const char* name) {
  BICL_CHECK(t.ndim() >= 1 && (t.size(-1) <= 1 || t.stride(-1) == 1))
      << name << " must be contiguous in its last dimension; its stride there is " << t.stride(-1);
}

inline cudaStream_t current_stream(int device) {
  return static_cast<cudaStream_t>(TVMFFIEnvGetStream(kDLCUDA, device));
}

// Views one layer's pool tensor [num_pages, H, 2, tiles, T, T]; page_size tells how the tiles divide.
inline Pages pages_of(const TensorView& t, int64_t page_size, double k_scale, double v_scale) {
  BICL_CHECK(t.device().device_type == kDLCUDA) << "pages must be on a CUDA device";
  check_shape(t, "pages", {-1, -1, 2, -1, -1, -1});
  check_contiguous(t, "pages");
  Pages p;
  p.data = t.data_ptr();
  p.dtype = dtype_of(t, "pages");
  p.num_pages = static_cast<int>(t.size(0));
  p.num_kv_heads = static_cast<int>(t.size(1));
  p.tile = static_cast<int>(t.size(4));
  p.page_size = static_cast<int>(page_size);
  BICL_CHECK((p.tile == 32 || p.tile == 64) && t.size(5) == p.tile)
      << "pages have tiles of " << t.size(4) << " x " << t.size(5) << "; 32 x 32 or 64 x 64 is needed";
  BICL_CHECK((page_size == 32 || page_size == 64) && page_size % p.tile == 0)
      << "page_size " << page_size << " does not hold tiles of " << p.tile;
  const int64_t token_tiles = page_size / p.tile;
  BICL_CHECK(t.size(3) % token_tiles == 0) << "pages have " << t.size(3) << " tiles a plane; a multiple of "
                                           << token_tiles << " is needed";
  p.padded_head_dim = static_cast<int>(t.size(3) / token_tiles * p.tile);
  BICL_CHECK(reinterpret_cast<uintptr_t>(p.data) % 128 == 0) << "pages must be 128-byte aligned";
  p.k_scale = static_cast<float>(k_scale);
  p.v_scale = static_cast<float>(v_scale);
  return p;
}

// num_kv_heads: where a table may name other pages for each KV head, [batch, num_kv_heads, max_pages]; 0: never.
inline Sequences sequences_of(const TensorView& page_table, const TensorView& cache_seqlens, int device,
                              int num_kv_heads = 0) {
  check_cuda(page_table, "page_table", device);
  check_cuda(cache_seqlens, "cache_seqlens", device);
  check_int(page_table, "page_table", 32);
  check_int(cache_seqlens, "cache_seqlens", 32);
  check_contiguous(cache_seqlens, "cache_seqlens");
  const int64_t batch = cache_seqlens.size(0);
  check_shape(cache_seqlens, "cache_seqlens", {batch});
  const bool by_head = num_kv_heads > 0 && page_table.ndim() == 3;
  if (by_head) check_shape(page_table, "page_table", {batch, num_kv_heads, -1});
  else check_shape(page_table, "page_table", {batch, -1});
  check_rows(page_table, "page_table");
  Sequences s;
  s.page_table = static_cast<const int32_t*>(page_table.data_ptr());
  s.cache_seqlens = static_cast<const int32_t*>(cache_seqlens.data_ptr());
  s.page_table_stride = page_table.stride(0);
  s.page_table_head_stride = by_head ? page_table.stride(1) : 0;
  s.batch = static_cast<int>(batch);
  return s;
}

// Rows of 16-bit elements, the last dimension's, that start at multiples of `elements`.
inline void check_aligned_rows(const TensorView& t, const char* name, int elements) {
  bool aligned = reinterpret_cast<uintptr_t>(t.data_ptr()) % (2 * elements) == 0;
  for (int d = 0; d + 1 < t.ndim(); ++d) aligned = aligned && (t.size(d) <= 1 || t.stride(d) % elements == 0);
  BICL_CHECK(aligned) << name << " rows must be " << 2 * elements << "-byte aligned";
}

// What all attention takes: query [tokens, heads, query_dim] and out [tokens, heads, out_dim] of one 16-bit dtype, lse
// float32 [heads, tokens] or null. Negative: any. Rows of out start at multiples of `out_elements`.
template <typename Params>
void set_rows(Params& p, const TensorView& out, const Optional<TensorView>& lse, const TensorView& query, int64_t tokens,
              int64_t query_dim, int64_t out_dim, int out_elements, int device) {
  check_cuda(query, "query", device);
  check_shape(query, "query", {tokens, -1, query_dim});
  check_rows(query, "query");
  const DType dtype = dtype_of(query, "query");
  BICL_CHECK(dtype == DType::kFloat16 || dtype == DType::kBFloat16) << "query must be float16 or bfloat16";
  BICL_CHECK(query.size(1) > 0) << "query has no heads";
  check_cuda(out, "out", device);
  check_shape(out, "out", {query.size(0), query.size(1), out_dim < 0 ? query.size(2) : out_dim});
  check_rows(out, "out");
  BICL_CHECK(dtype_of(out, "out") == dtype) << "out must have the query's dtype";
  check_aligned_rows(query, "query", 8);
  check_aligned_rows(out, "out", out_elements);
  p.query = query.data_ptr();
  p.out = out.data_ptr();
  p.query_token_stride = query.stride(0);
  p.query_head_stride = query.stride(1);
  p.out_token_stride = out.stride(0);
  p.out_head_stride = out.stride(1);
  p.lse = nullptr;
  if (!lse.has_value()) return;
  const TensorView& t = lse.value();
  check_cuda(t, "lse", device);
  check_shape(t, "lse", {query.size(1), query.size(0)});
  check_contiguous(t, "lse");
  BICL_CHECK(dtype_of(t, "lse") == DType::kFloat32) << "lse must be float32";
  p.lse = static_cast<float*>(t.data_ptr());
}

// The same over pages of keys and values, head_dim as the query's.
template <typename Params>
void set_paged_rows(Params& p, const TensorView& out, const Optional<TensorView>& lse, const TensorView& query,
                    int64_t tokens, int out_elements, int device) {
  set_rows(p, out, lse, query, tokens, -1, -1, out_elements, device);
  p.query_dtype = dtype_of(query, "query");
  p.num_q_heads = static_cast<int>(query.size(1));
  p.head_dim = static_cast<int>(query.size(2));
  BICL_CHECK(p.pages.dtype == p.query_dtype || is_fp8(p.pages.dtype))
      << "query must have the pages' dtype, or the pages must be fp8";
  BICL_CHECK(p.num_q_heads % p.pages.num_kv_heads == 0)
      << p.num_q_heads << " query heads do not divide among " << p.pages.num_kv_heads << " KV heads";
  BICL_CHECK(p.head_dim <= p.pages.padded_head_dim)
      << "head_dim " << p.head_dim << " exceeds the pages' " << p.pages.padded_head_dim;
  BICL_CHECK(p.head_dim > 0 && p.head_dim % 8 == 0) << "head_dim " << p.head_dim << " must be a multiple of 8";
}

}  // namespace bicl
