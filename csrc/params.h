// What the host tells the device: plain structs, one per operator.
//
// Strides are in elements unless the name says bytes. Pointers are device pointers; the shape stands
// beside each. Nothing here knows tensors, torch or Python.
#pragma once

#include <cstdint>

namespace bicl {

enum class DType : int { kFloat32, kFloat16, kBFloat16, kFloat8E4M3, kFloat8E5M2 };

constexpr int element_bytes(DType dtype) {
  return dtype == DType::kFloat32 ? 4 : dtype == DType::kFloat16 || dtype == DType::kBFloat16 ? 2 : 1;
}

constexpr bool is_fp8(DType dtype) {
  return dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E5M2;
}

// One layer's pages: [num_pages][num_kv_heads][2 (K, V)][tiles][tile][tile].
struct Pages {
  void* data;
  DType dtype;
  int num_pages;
  int num_kv_heads;
  int page_size;        // P, tokens a page: 32 or 64
  int tile;             // T, tile edge: 32 or 64, T <= P
  int padded_head_dim;  // D, multiple of T
  float k_scale;        // stored value * scale = original; 1 unless fp8
  float v_scale;
};

// Cached sequences of one step.
struct Sequences {
  const int32_t* page_table;     // [batch][page_table_stride]; entries past ceil(len / P) are never read
  const int32_t* cache_seqlens;  // [batch], tokens including those stored in this step
  int64_t page_table_stride;
  int64_t page_table_head_stride;  // from one KV head's list of pages to the next; 0: all heads share one
  int batch;
};

struct StoreKvParams {
  Pages pages;
  const void* key;      // [num_tokens][num_kv_heads][head_dim], last dim contiguous
  const void* value;    // same shape
  const int64_t* slots; // [num_tokens]; negative: skip
  int64_t key_token_stride, key_head_stride;
  int64_t value_token_stride, value_head_stride;
  DType input_dtype;
  int num_tokens;
  int head_dim;  // columns head_dim .. D are written as zeros
  bool pdl;      // programmatic dependent launch
};

struct RotateAndStoreParams {
  StoreKvParams store;  // key before its rotation; 16-bit elements, head_dim = D
  void* query;          // [num_tokens][num_q_heads][head_dim], last dim contiguous
  const void* cos;      // [num_tokens][rotary_dim], last dim contiguous
  const void* sin;      // same shape
  int64_t query_token_stride, query_head_stride, cos_stride, sin_stride;
  int num_q_heads;
  int rotary_dim;  // dims that turn, from the first
};

struct GatherParams {
  Pages pages;
  Sequences sequences;
  const int64_t* offsets;  // [batch], first output row of each sequence
  void* key;               // [sum(cache_seqlens)][num_kv_heads][head_dim], contiguous
  void* value;             // same shape
  DType output_dtype;
  int head_dim;
  int max_tokens;          // host upper bound of cache_seqlens
};

// fp8 pages of a step's sequences as 16-bit pages: page j of sequence b becomes page b * pages_per_sequence + j.
struct WidenPagesParams {
  Pages source;
  Pages target;         // of the source's KV heads [first_head, first_head + target.num_kv_heads)
  Sequences sequences;  // in the source
  int first_head;
  int pages_per_sequence;
  bool pdl;
};

struct CopyPagesParams {
  const int64_t* layers;      // [num_layers], device address of each layer's pages
  const int64_t* page_bytes;  // [num_layers], multiples of 16
  const int64_t* source;      // [num_pairs], page ids; disjoint from target
  const int64_t* target;      // [num_pairs]
  int num_layers;
  int num_pairs;
};

constexpr int kSmallCopies = 16;

// Pieces of bytes that overlap nowhere.
struct SmallCopiesParams {
  const char* sources[kSmallCopies];
  char* targets[kSmallCopies];
  int bytes[kSmallCopies];
  int count;
};

// What a model's decode step reads beside its weights and pages; one row a sequence.
struct StepInputs {
  int64_t* input_ids;
  int32_t* positions;
  int64_t* slots;
  int32_t* input_lengths;  // tokens of this step
  int32_t* cache_lengths;  // tokens before it
  int32_t* page_table;
  int64_t page_table_stride;
};

struct StageStepParams {
  StepInputs source;           // [batch], but for slots
  StepInputs target;           // [rows], at addresses that a captured graph reads
  const int64_t* slot_places;  // [batch], where each sequence's slot stands in source.slots
  int batch;
  int rows;       // those past the batch become empty sequences
  int num_pages;  // columns of source.page_table
};

struct DecodeParams {
  // What a launch needs first stands first: parameters come from memory a line at a time.
  Sequences sequences;
  Pages pages;
  int window_left;     // keys before the query's own that it sees; -1: all
  bool deterministic;  // cuts depend on a sequence's own length only
  bool pdl;            // the kernel before this one may still be writing each sequence's newest token
  bool late_table;     // with pdl: and the page table
  bool late_lengths;   // with late_table: and the lengths
  const void* query;  // [batch][num_q_heads][head_dim], last dim contiguous
  void* out;          // same shape and dtype
  float* lse;         // [num_q_heads][batch] natural log, or null
  int64_t query_token_stride, query_head_stride;
  int64_t out_token_stride, out_head_stride;
  DType query_dtype;
  int num_q_heads;
  int head_dim;
  float scale;       // of the raw scores, without k_scale
  float softcap;     // 0: off
  void* workspace;   // float partials, see decode_workspace_bytes; contents do not matter
  int32_t* counters; // [batch * kv heads * head blocks], zero between launches
  int64_t workspace_bytes;
  int num_counters;
  int num_sms;
  bool force_sm80;     // tests: take the sm_80 path on any card
  int force_cluster;   // benchmarks: cluster size (1: stream-K); 0: by rule
  int force_grid;      // benchmarks: CTAs of stream-K; 0: by rule
};

// What is kept of every page of a sparse layer, a record each; see bicl/sparse/index.py.
struct PageIndex {
  // Of each KV head and centroid, [num_kv_heads][centroids]: a row of nibbles n; __half2 (a, b), a dim, turned as in
  // hadamard.cuh, being a n + b; two bytes: the keys that it stands for, and in e5m2 the mean square of what a dim of
  // theirs differs from it by.
  uint8_t* records;
  int64_t record_bytes;  // a multiple of 16
  int centroids;         // 2, 4 or 8
  int row_bytes;         // half of head_dim rounded up to a multiple of 32
};

struct IndexPagesParams {
  Pages pages;
  PageIndex index;
  const int64_t* slots;  // [num_tokens]; the last slot of a page says that it is complete; negative: skip
  int num_tokens;
  int head_dim;
  bool pdl;
};

// How many tiles (= pages) a sequence reads; the rule is tiles_to_keep() in bicl/sparse/selection.py.
struct SelectionRule {
  int max_k, first, recent, floor;
};

// How the query heads of a KV head agree: the greatest score, the sum, or the sum of each head's softmax over the
// pages that compete.
enum class Combine : int { kMax, kSum, kSoftmax };

// Scoring, selection, or both: what a step has no use for is null.
struct TilesParams {
  // What a launch needs first stands first: parameters come from memory a line at a time.
  Sequences sequences;       // page_table [batch][max_pages]
  const float* sparsity;     // [batch]
  float share;               // of each, which this layer leaves out
  SelectionRule rule;
  int page_size, max_pages;
  int num_q_heads, num_kv_heads;
  bool pdl;
  bool late_input;           // with pdl: the kernel ahead writes more of what is read than the query
  PageIndex index;
  DType query_dtype;         // float16 or bfloat16
  int head_dim;              // a multiple of 8
  const void* query;         // [batch][num_q_heads][head_dim], rows 16-byte aligned
  int64_t query_token_stride, query_head_stride;
  const float* weights;      // [head_dim], of the dims of the centroids
  float scale;               // of the attention scores
  Combine combine;
  float* scores;             // [batch][num_q_heads][max_pages]: written if scoring alone, read if selecting alone
  int32_t* selected;         // [batch][num_kv_heads][max_pages] page ids, ascending in position
  int32_t* positions;        // the same shape, where they stand in the sequence; or null
  int32_t* selected_seqlens; // [batch] tokens
  int num_sms;
  int force_cluster;         // tests and benchmarks: CTAs a (sequence, KV head); 0: by rule
};

struct RotaryParams {
  void* query;      // [num_tokens][num_q_heads][head_dim], last dim contiguous; rotated in place
  void* key;        // [num_tokens][num_kv_heads][head_dim], the same
  const void* cos;  // [num_tokens][rotary_dim], of the first rotary_dim dims
  const void* sin;
  int64_t query_token_stride, query_head_stride;
  int64_t key_token_stride, key_head_stride;
  int64_t cos_stride, sin_stride;
  DType dtype;  // of all, float16 or bfloat16
  int num_tokens;
  int num_q_heads, num_kv_heads;
  int rotary_dim;  // even
  bool pdl;
};

struct RmsNormParams {
  const void* x;       // [num_tokens][width], last dim contiguous
  void* out;           // same shape
  const void* weight;  // [width]
  int64_t x_stride, out_stride;
  int64_t num_tokens;
  DType dtype;  // of all, float16 or bfloat16
  int width;
  float eps;
  bool pdl;
};

struct FewRowsLinearParams {
  void* out;           // [num_rows][num_outputs], last dim contiguous
  const void* x;       // [num_rows][depth], the same
  const void* weight;  // [num_outputs][depth], the same
  const void* bias;    // [num_outputs] or null
  int64_t out_stride, x_stride, weight_stride;
  DType dtype;  // of all, float16 or bfloat16
  int num_rows, num_outputs, depth;
  bool add;  // to what out holds
  bool pdl;
};

struct SwigluParams {
  void* out;            // [num_tokens][width]
  const void* gate_up;  // [num_tokens][2 * width], gates first
  int64_t out_stride, gate_up_stride;
  int64_t num_tokens;
  DType dtype;  // float16 or bfloat16
  int width;
  bool pdl;
};

struct CompactTokensParams {
  Pages source, target;
  const int32_t* page_table;    // [max_pages], of the source
  const int32_t* positions;     // [num_kv_heads][num_tokens] tokens to move; their order is kept
  const int32_t* target_pages;  // [ceil(num_tokens / P)]
  int64_t positions_stride;
  int num_tokens;
};

}  // namespace bicl
