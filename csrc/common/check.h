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

}  // namespace bicl
