// What the host tells a kernels of latent pages (MLA).
#pragma once

#include "../params.h"

namespace bicl {

// One latent of 576 elements a token, shared by all heads; values are its first 512.
constexpr int kLatentDim = 576;
constexpr int kValueDim = 512;
// Sequences of one step: their running sums lie in shared memory.
constexpr int kMlaMaxBatch = 2047;

struct MlaDecodeParams {
  Sequences sequences;
  int table_columns;  // of page_table
  const void* pages;  // [num_pages][9 tiles][64 tokens][64 dims], swizzled
  const void* query;  // [batch][num_heads][576], last dim contiguous
  void* out;          // [batch][num_heads][512], the same
  float* lse;         // [num_heads][batch] natural log, or null
  int64_t query_token_stride, query_head_stride;
  int64_t out_token_stride, out_head_stride;
  DType dtype;        // of pages, query and out: float16 or bfloat16
  int num_heads;
  float scale;        // of the raw scores
  float* workspace;   // partial results, see mla_workspace_bytes(); contents do not matter
  int32_t* counters;  // [batch * head blocks], zero between launches
  int64_t workspace_bytes;
  int num_counters;
  bool pdl;           // programmatic dependent launch
};

struct StoreLatentParams {
  void* pages;           // as above
  const void* latent;    // [num_tokens][576], last dim contiguous
  const int64_t* slots;  // [num_tokens]; negative: skip
  int64_t token_stride;
  int num_tokens;
};

}  // namespace bicl
