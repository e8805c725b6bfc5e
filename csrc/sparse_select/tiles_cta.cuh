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

// A warp scores eight pages at a time.
constexpr int kOctet = 8;
constexpr int kMaxStages = 4;
constexpr int kScoringWarps = 16;  // of a CTA that scores alone

// Pages that compete with each other, in whose index a page has so many centroids.
constexpr int stratum_pages(int centroids) { return kStratumTokens / (centroids * kCentroidTokens); }

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, step));
  return value;
}
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  return value;
}

struct TilesKernelParams {
  // What is needed first stands first: parameters come from memory a line at a time.
  FastDiv splits;  // CTAs a (sequence, KV head)
  FastDiv heads;   // KV heads
  int group;       // query heads of one KV head
  int blocks;      // of 4 query heads
  int steps;       // of 4 pieces, in a row of the index
  int warps;       // of a CTA that score; where it chooses more of them pick
  int page_log2;   // of tokens a page
  int stages_log2; // of a warp's ring of octets; -1: the card has no copy engine
  int page_stride; // of a page in the ring
  TilesParams p;

  // Of a head's scores of a stratum in shared memory, and of the sequence's first pages: four heads' octets lie in all
  // banks.
  __host__ __device__ int row_stride() const { return (warps + 1) * kOctet; }
  // Of a warp's ring.
  __host__ __device__ int ring_bytes() const { return stages_log2 < 0 ? 0 : page_stride * kOctet << stages_log2; }
};

struct TilesShared {
  char* ring;          // [warp][stage][kOctet][page_stride], rows of the index
  uint64_t* barriers;  // [warp][kMaxStages]
  uint4* vectors;      // [blocks][steps][2][lane], the queries
  uint4* queries;      // [group][head_dim] as they come
  float4* weights;     // [head_dim]
  float4* scales;      // [4 blocks], of the queries' products; sum of their elements; half their squared length; nothing
  uint4* keys;         // [stratum] of four bytes
  float* scores;       // [2][group][row_stride]: of this turn and of the last
  float* firsts;       // [group]: logarithms of the sums over the first pages

  // A warp scores an octet, and picks among 32.
  __host__ __device__ static int all_warps(const TilesKernelParams& k, Work work) {
    return k.warps + (work == Work::kChoose ? k.warps * kOctet / 32 : 0);
  }
  // With a ring: those that score, and the first that picks, for the sequence's first pages.
  __host__ __device__ static int rings(const TilesKernelParams& k, Work work) {
    return k.warps + (work == Work::kChoose ? 1 : 0);
  }
  static int bytes(const TilesKernelParams& k, Work work) {
    int bytes = rings(k, work) * k.ring_bytes() + all_warps(k, work) * kMaxStages * 8 +
                (k.blocks * k.steps * 64 + k.group * k.p.head_dim / 8 + k.p.head_dim / 4 + 4 * k.blocks) * 16;
    if (work == Work::kChoose) bytes += k.warps * kOctet * 4 + k.group * (2 * k.row_stride() + 1) * 4;
    return bytes;
  }
  __device__ __forceinline__ TilesShared(char* base, const TilesKernelParams& k, Work work) {
    ring = base;
    barriers = reinterpret_cast<uint64_t*>(ring + rings(k, work) * k.ring_bytes());
    vectors = reinterpret_cast<uint4*>(barriers + all_warps(k, work) * kMaxStages);
    queries = vectors + k.blocks * k.steps * 64;
    weights = reinterpret_cast<float4*>(queries + k.group * k.p.head_dim / 8);
    scales = weights + k.p.head_dim / 4;
    keys = reinterpret_cast<uint4*>(scales + 4 * k.blocks);
    scores = reinterpret_cast<float*>(keys + k.warps * kOctet / 4);
    firsts = scores + 2 * k.group * k.row_stride();
  }
};

// How many pages of a sequence are read, and which compete with each other: tiles_to_keep() and select_tiles() in
// bicl/sparse. Of `keep` pages all but `need` stand at the sequence's ends; those between compete in strata.
struct TilesRow {
  int length = 0, count = 0;  // tokens and pages of the sequence
  int keep = 0, need = 0;
  int begin = 0, end = 0;  // the pages that compete; those from `end` on have no index yet, or one just being written
  int strata = 1;

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
  __device__ __forceinline__ int size(int stratum) const {
    const int pages = end - begin;
    return pages / strata + (stratum < pages % strata ? 1 : 0);
  }
  __device__ __forceinline__ int quota(int stratum) const {
    return need / strata + (stratum < need % strata ? 1 : 0);
  }
  __device__ __forceinline__ int before(int stratum) const {
    return stratum * (need / strata) + min(stratum, need % strata);
  }
};

struct TilesContext {
  const TilesKernelParams& k;
  const TilesParams& p;
  const TilesShared shared;
  const int warp, lane;
  int sequence, head;
  int rank;  // among the CTAs of the row
  TilesRow row;

  __device__ __forceinline__ TilesContext(const TilesKernelParams& k, char* base, Work work)
      : k(k), p(k.p), shared(base, k, work), warp(threadIdx.x / 32), lane(threadIdx.x % 32) {
    uint32_t own_head, own_rank;
    const uint32_t pair = k.splits.divide(blockIdx.x, own_rank);
    sequence = k.heads.divide(pair, own_head);
    head = own_head;
    rank = own_rank;
  }

  // Which of the warps that pick it is; negative: one that scores.
  __device__ __forceinline__ int picker() const { return warp - k.warps; }
  __device__ __forceinline__ int splits() const { return static_cast<int>(k.splits.divisor); }
  __device__ __forceinline__ const int32_t* table() const {
    return p.sequences.page_table + sequence * p.sequences.page_table_stride;
  }
  // First entry of the row in tables of max_pages.
  __device__ __forceinline__ int64_t row_offset() const {
    return (static_cast<int64_t>(sequence) * p.num_kv_heads + head) * p.max_pages;
  }
  // A query head's scores of a turn's stratum; the first pages' stand behind it, of turn 0.
  __device__ __forceinline__ float* scores(int turn, int query_head) const {
    return shared.scores + ((turn & 1) * k.group + query_head) * k.row_stride();
  }
};

}  // namespace bicl::sparse
