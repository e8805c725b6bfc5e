// What the parts of choosing share: the launch, the CTA's memory, its row, and which warp has which pages.
#pragma once

#include "../common/fast_div.h"
#include "../common/layout.cuh"
#include "../common/numeric.cuh"
#include "../common/ptx.cuh"

namespace bicl::sparse {

enum class Work { kScore, kChoose };

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLeast = -1e30f;  // below any score; finite, so that differences stay numbers

constexpr int kPieceBytes = 16;  // of a row of the index: 32 elements

// A warp scores eight pages at a time.
constexpr int kOctet = 8;

// Who does what, and how many pages compete with each other, in whose index a page has so many centroids. Where pages are
// chosen eight warps score a stratum, and one picks.
template <int kCentroids_, Work kWork>
struct TilesShape {
  static constexpr int kCentroids = kCentroids_;
  static constexpr bool kChooses = kWork == Work::kChoose;
  static constexpr int kStratum = kStratumTokens / (kCentroids * kCentroidTokens);
  static constexpr int kScorers = kChooses ? 8 : 16;
  static constexpr int kThreads = 32 * (kScorers + (kChooses ? 1 : 0));
  static constexpr int kTurnOctets = kStratum / (kScorers * kOctet);  // of a warp, in a stratum
  static constexpr int kDepth = 16 / kCentroids;                      // of a warp's ring of octets
};

// Over the lanes that differ in bits from `least` up to `most`.
__device__ __forceinline__ float lanes_max(float value, int least, int most) {
#pragma unroll
  for (int step = least; step <= most; step *= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, step));
  return value;
}
__device__ __forceinline__ float lanes_sum(float value, int least, int most) {
#pragma unroll
  for (int step = least; step <= most; step *= 2) value += __shfl_xor_sync(~0u, value, step);
  return value;
}

struct TilesKernelParams {
  // What is needed first stands first: parameters come from memory a line at a time.
  FastDiv splits;  // CTAs a (sequence, KV head)
  FastDiv heads;   // KV heads
  int group;       // query heads of one KV head
  int blocks;      // of 4 query heads
  int steps;       // of 4 pieces, in a row of the index
  int page_log2;   // of tokens a page
  int page_stride; // of a page in the ring
  TilesParams p;
};

// What follows from the index and the heads.
inline void set_shape(TilesKernelParams& k) {
  k.group = k.p.num_q_heads / k.p.num_kv_heads;
  k.blocks = (k.group + 3) / 4;
  k.steps = (k.p.index.row_bytes + 4 * kPieceBytes - 1) / (4 * kPieceBytes);
  k.heads = FastDiv(k.p.num_kv_heads);
  k.page_log2 = k.p.page_size == 64 ? 6 : 5;
  // Behind the rows three more chunks; two pages of the ring lie in all banks.
  const int chunks = k.p.index.centroids * k.p.index.row_bytes / kPieceBytes + 3;
  k.page_stride = (chunks + (12 - chunks % 8) % 8) * kPieceBytes;
}

// Shared memory. Of scores there are two buffers, for strata in turns.
template <typename Shape>
struct TilesShared {
  static constexpr int kOctets = Shape::kStratum / kOctet;
  static constexpr int kScoreStride = Shape::kStratum + 8;  // four heads' octets lie in all banks
  static constexpr int kRings = Shape::kThreads / 32;

  char* ring;          // [kRings][kDepth][kOctet][page_stride], of the index
  uint64_t* full;      // [2]: a buffer's scores are there
  uint64_t* free;      // [2]: they have been read
  uint4* vectors;      // [blocks][steps][2][lane], the queries
  float4* scales;      // [4 blocks], of the queries' products; sum of their elements; half their squared length; nothing
  float* scores;       // [2][group][kScoreStride]
  float* sums;         // [2][group][kOctets]: of each octet, as a logarithm
  float* firsts;       // [group]: the same of the first pages

  static int bytes(const TilesKernelParams& k) {
    int bytes = kRings * Shape::kDepth * kOctet * k.page_stride + 4 * 8 +
                (k.blocks * k.steps * 64 + 4 * k.blocks) * 16;
    if (Shape::kChooses) bytes += k.group * (2 * (kScoreStride + kOctets) + 1) * 4;
    return bytes;
  }
  __device__ __forceinline__ TilesShared(char* base, const TilesKernelParams& k) {
    ring = base;
    full = reinterpret_cast<uint64_t*>(ring + kRings * Shape::kDepth * kOctet * k.page_stride);
    free = full + 2;
    vectors = reinterpret_cast<uint4*>(free + 2);
    scales = reinterpret_cast<float4*>(vectors + k.blocks * k.steps * 64);
    scores = reinterpret_cast<float*>(scales + 4 * k.blocks);
    sums = scores + 2 * k.group * kScoreStride;
    firsts = sums + 2 * k.group * kOctets;
  }
};

// How many pages of a sequence are read, and which compete with each other; bicl/sparse/selection.py has the rule. Of `keep` pages all but `need` stand at the sequence's ends; those between compete in strata.
struct TilesRow {
  int length = 0, count = 0;  // tokens and pages of the sequence
  int keep = 0, need = 0;
  int begin = 0, end = 0;  // the pages that compete; those from `end` on have no index yet, or one just being written
  int strata = 1;
  int least = 0, larger = 0;  // pages of every stratum, and how many strata have one more
  int each = 0, more = 0;     // pages that every stratum takes, and how many strata take one more

  // A stratum has one page of every `strata` in a row, not always the same one, since texts repeat at equal distances.
  // Where its page `place` stands; -1: it has fewer.
  __device__ __forceinline__ int page(int stratum, int place) const {
    const int first = begin + place * strata;
    int offset = stratum;
    if (first + strata <= end) {
      offset -= ((place * place * 40503 & 0xffff) * strata) >> 16;  // squares times the golden ratio
      if (offset < 0) offset += strata;
    }
    return first + offset < end ? first + offset : -1;
  }

  // Pages of a stratum, those that it takes, and how many those before it take.
  __device__ __forceinline__ int size(int stratum) const { return least + (stratum < larger ? 1 : 0); }
  __device__ __forceinline__ int quota(int stratum) const { return each + (stratum < more ? 1 : 0); }
  __device__ __forceinline__ int before(int stratum) const { return stratum * each + min(stratum, more); }
};

// stratum: pages of one. Each operation rounded, as in tiles_to_keep().
__device__ __forceinline__ TilesRow tiles_row(int tokens, float sparsity, const SelectionRule& rule, int page_log2,
                                              int max_pages, int stratum) {
  TilesRow row;
  row.length = max(tokens, 0);
  row.count = min((row.length + (1 << page_log2) - 1) >> page_log2, max_pages);
  row.begin = min(rule.first, row.count);
  row.end = max(row.begin, row.count - rule.recent);
  const int skipped = static_cast<int>(floorf(__fadd_rn(__fmul_rn(static_cast<float>(row.count), sparsity), 1.f / 64)));
  const int kept = min(max(row.count - skipped, max(rule.floor, rule.first + rule.recent)), rule.max_k);
  row.keep = sparsity > 0.f ? min(kept, row.count) : row.count;
  row.need = row.keep - (row.count - (row.end - row.begin));
  row.strata = max(1, (row.end - row.begin + stratum - 1) / stratum);
  row.least = (row.end - row.begin) / row.strata;
  row.larger = (row.end - row.begin) % row.strata;
  row.each = row.need / row.strata;
  row.more = row.need % row.strata;
  return row;
}

template <typename Shape_>
struct TilesContext {
  using Shape = Shape_;

  const TilesKernelParams& k;
  const TilesParams& p;
  const TilesShared<Shape> shared;
  const int warp, lane;
  int sequence, head;
  int rank;  // among the CTAs of the row
  TilesRow row;

  __device__ __forceinline__ TilesContext(const TilesKernelParams& k, char* base)
      : k(k), p(k.p), shared(base, k), warp(threadIdx.x / 32), lane(threadIdx.x % 32) {
    uint32_t own_head, own_rank;
    const uint32_t pair = k.splits.divide(blockIdx.x, own_rank);
    sequence = k.heads.divide(pair, own_head);
    head = own_head;
    rank = own_rank;
  }
  __device__ __forceinline__ bool picks() const { return warp == Shape::kScorers; }
  __device__ __forceinline__ int splits() const { return static_cast<int>(k.splits.divisor); }
  __device__ __forceinline__ const int32_t* table() const {
    return p.sequences.page_table + sequence * p.sequences.page_table_stride;
  }
  // First entry of the row in tables of max_pages.
  __device__ __forceinline__ int64_t row_offset() const {
    return (static_cast<int64_t>(sequence) * p.num_kv_heads + head) * p.max_pages;
  }
  // A query head's scores of a stratum, in the buffer of an odd or an even number, and the sums of its octets.
  __device__ __forceinline__ float* scores(int number, int query_head) const {
    return shared.scores + ((number & 1) * k.group + query_head) * shared.kScoreStride;
  }
  __device__ __forceinline__ float* sums(int number, int query_head) const {
    return shared.sums + ((number & 1) * k.group + query_head) * shared.kOctets;
  }
};

}  // namespace bicl::sparse
