// What the host tells the prefill kernels. Strides are in elements.
#pragma once

#include <cuda_runtime.h>

#include "../common/fast_div.h"
#include "../params.h"

namespace bicl {

// Rows of a tile are (token, query head of one KV head) pairs, heads fastest: row = token * group + head.
constexpr int kPrefillRows = 128;  // rows of a scheduled tile
constexpr int kPrefillKeys = 128;  // keys of a scheduled block, at absolute multiples
constexpr int kCombineDims = 32;   // head dims that one combine ticket merges
constexpr int kUnlimited = 1 << 30;
constexpr int kMaxPartials = 1 << 10;  // what SplitPlace can hold

// One tile of work, or one piece of it when its keys are split.
struct PrefillTile {
  int sequence;
  int query_start;  // first token of the sequence in the packed query
  int query_len;
  int key_len;
  int row;          // first row within the sequence
  int block_begin;  // blocks of kPrefillKeys keys [begin, end); equal: no row sees a key
  int block_end;
  int split;        // -1, or a SplitPlace
};

// Where a piece of a split tile leaves its partial, among those of one KV head: `slot` of the workspace, the pieces'
// slots in a row; `index` counts the split tiles. Heads lie PrefillHeader::head_partials apart.
struct SplitPlace {
  int slot, index, pieces;

  static constexpr int kBits = 10;
  BICL_HD static SplitPlace unpack(int split) {
    constexpr int kMask = (1 << kBits) - 1;
    return {split & kMask, split >> kBits & kMask, split >> (2 * kBits)};
  }
  BICL_HD int pack() const { return (pieces << kBits | index) << kBits | slot; }
};

// A CTA's first ticket, so that it starts after one read. Meaningful below PrefillHeader::work_tickets.
struct PrefillStart {
  PrefillTile tile;
  int head;
};

struct PrefillHeader {
  int num_tiles;          // tile list entries (split pieces counted) of each section of KV heads but the last
  int heads_per_section;  // KV heads worked on at a time, so that their K and V stay in L2
  int num_splits;
  int next_ticket;        // beyond the first gridDim; the last CTA resets it
  int work_tickets;
  int total_tickets;      // with the combine tickets
  int tail_begin;         // the last section goes from this entry to num_tiles: see plan_tail.cuh
  int split_heads;        // the last so many KV heads have the split tiles
  int head_partials;      // partials of each of them
  int ahead;              // so many blocks before its tile's end a CTA draws the next ticket
  int unused[2];
};

// Views into the workspace. Made by plan_view, valid until the next plan on the same workspace.
struct PrefillPlan {
  PrefillHeader* header;
  int* split_entries;       // [max_partials], tile list index of each split tile's piece 0
  int* arrived;             // [max_partials], zero between launches: warps that stored a partial
  int* combined;            // [max_partials], zero between launches
  PrefillTile* tiles;       // [max_tiles]
  PrefillStart* starts;     // [num_ctas]
  float2* partial_rows;     // [max_partials][kPrefillRows] (max, sum)
  float* partials;          // [max_partials][kPrefillRows * D]
  int piece_step;           // 1, from one piece's slot to the next; a parameter for ptxas, see sm90/partials.cuh
  int max_tiles;
  int max_partials;
};

// Visible keys of the query at position pos = key_len - query_len + token: [pos - left, pos + right].
struct PrefillWindow {
  int left;   // kUnlimited: no bound
  int right;  // 0: causal; kUnlimited: no bound

#if defined(__CUDACC__)
  __device__ __forceinline__ int end(int pos, int key_len) const {
    return min(key_len, min(pos, kUnlimited - 1 - right) + right + 1);
  }
  __device__ __forceinline__ int begin(int pos) const { return max(0, pos - left); }
#endif
};

struct PrefillPlanParams {
  const int32_t* cu_seqlens_q;   // [batch + 1]
  const int32_t* cache_seqlens;  // [batch]
  PrefillPlan plan;
  PrefillWindow window;
  FastDiv group;
  int batch;
  int num_kv_heads;
  int padded_head_dim;
  int kv_bytes;     // of one token and KV head, K and V
  int num_ctas;     // persistent CTAs to balance for
  bool allow_split;
};

struct PrefillParams {
  Pages pages;
  Sequences sequences;
  PrefillPlan plan;
  const void* query;  // [num_tokens][num_q_heads][head_dim], last dim contiguous, rows 16-byte aligned
  void* out;          // same shape and dtype
  float* lse;         // [num_q_heads][num_tokens] natural log, or null
  int64_t query_token_stride, query_head_stride;
  int64_t out_token_stride, out_head_stride;
  DType query_dtype;
  PrefillWindow window;
  FastDiv group;
  int num_tokens;
  int num_q_heads;
  int head_dim;
  float scale;    // of the raw scores, without k_scale
  float softcap;  // 0: off
  bool pdl;
};

// Work ticket to (list entry, KV head): sections of KV heads outermost, heads of a section innermost.
BICL_HD void split_ticket(int ticket, const PrefillHeader& header, int num_kv_heads, int& entry, int& head) {
  const int section = header.heads_per_section, per_section = header.num_tiles * section;
  int first_head = ticket / per_section * section;
  const bool last = first_head + section >= num_kv_heads;  // it may have more tickets than the others
  if (last) first_head = num_kv_heads - section;
  const int rest = ticket - first_head * header.num_tiles;
  entry = rest / section;
  head = first_head + rest - entry * section;
  if (last && entry >= header.tail_begin) entry += header.num_tiles - header.tail_begin;
}

}  // namespace bicl
