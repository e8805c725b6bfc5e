// What the parts of choosing share: the launch, the CTA's memory, its row, and which warp has which pages.
#pragma once

#include "../common/fast_div.h"
#include "../common/layout.cuh"
#include "../common/numeric.cuh"
#include "peers.cuh"
#include "topk.cuh"

namespace bicl::sparse {

enum class Work { kScore, kSelect, kChoose };

constexpr float kLeast = -1e30f;  // below any score; finite, so that differences stay numbers

// A warp scores eight pages at a time.
constexpr int kOctet = 8;
constexpr int kMaxWorkers = kMaxCluster * kMaxWarps;
constexpr int kMaxStages = 4;

struct TilesKernelParams {
  // What is needed first stands first: parameters come from memory a line at a time.
  FastDiv splits;  // CTAs a (sequence, KV head)
  FastDiv heads;   // KV heads
  int group;       // query heads of one KV head
  int blocks;      // of 4 query heads
  int steps;       // of 4 pieces, in a row of the index
  int warps;       // of a CTA
  int warp_pages;  // room for a warp's scores of a head, a multiple of kOctet
  int page_log2;   // of tokens a page
  int stages_log2; // of a warp's ring of octets; -1: the card has no copy engine
  int page_stride; // of a page in the ring
  TilesParams p;

  // Of a head's scores in shared memory; + 8: four heads' octets lie in all banks.
  __host__ __device__ int row_stride() const { return warps * warp_pages + 8; }
  // Of a warp's ring.
  __host__ __device__ int ring_bytes() const { return stages_log2 < 0 ? 0 : page_stride * kOctet << stages_log2; }
};

// Shared memory beside TopKScratch.
struct TilesShared {
  static constexpr int kSumStride = kMaxWarps + kMaxCluster;  // heads lie in all banks

  char* ring;       // [warp][stage][kOctet][page_stride], rows of the index
  uint64_t* barriers;  // [warp][kMaxStages]
  uint4* vectors;   // [blocks][steps][2][lane], the queries
  float4* scales;   // [4 blocks], of the queries' products; sum of their elements; half their squared length; nothing
  uint4* queries;   // [group][head_dim] as they come
  float4* weights;  // [head_dim]
  float* sums;      // [group][kSumStride]: logarithms of the CTA's warps' sums, and of the CTAs' of the cluster
  uint2* ranges;    // [kMaxWorkers]: least and greatest key of each
  float* factors;   // [warp][group], of the warp's scores
  float* scores;    // [group][row_stride], each warp's side by side
  int32_t* pages;   // [max_pages], the sequence's page table
  uint32_t* keys;   // [max_pages]

  __host__ __device__ static int vector_count(const TilesKernelParams& k, Work work) {
    return work == Work::kSelect ? 0 : k.blocks * k.steps * 64;
  }
  static __host__ __device__ int query_count(const TilesKernelParams& k, Work work) {
    return work == Work::kSelect ? 0 : k.group * k.p.head_dim / 8;
  }
  static __host__ __device__ int weight_count(const TilesKernelParams& k, Work work) {
    return work == Work::kSelect ? 0 : k.p.head_dim / 4;
  }
  static int bytes(const TilesKernelParams& k, Work work) {
    int bytes = (vector_count(k, work) + query_count(k, work) + weight_count(k, work)) * 16 + k.blocks * 64;
    if (work != Work::kSelect) bytes += k.warps * (k.ring_bytes() + kMaxStages * 8);
    if (work != Work::kScore)
      bytes += k.group * (kSumStride * 4 + k.warps * 4 + k.row_stride() * 4) + kMaxWorkers * 8 + k.p.max_pages * 8;
    return bytes;
  }
  __device__ __forceinline__ TilesShared(char* base, const TilesKernelParams& k, Work work) {
    ring = base;
    barriers = reinterpret_cast<uint64_t*>(ring + (work == Work::kSelect ? 0 : k.warps * k.ring_bytes()));
    vectors = reinterpret_cast<uint4*>(barriers + (work == Work::kSelect ? 0 : k.warps * kMaxStages));
    queries = vectors + vector_count(k, work);
    weights = reinterpret_cast<float4*>(queries + query_count(k, work));
    scales = reinterpret_cast<float4*>(weights + weight_count(k, work));
    sums = reinterpret_cast<float*>(scales + 4 * k.blocks);
    ranges = reinterpret_cast<uint2*>(sums + k.group * kSumStride);
    factors = reinterpret_cast<float*>(ranges + kMaxWorkers);
    scores = factors + k.group * k.warps;
    pages = reinterpret_cast<int32_t*>(scores + k.group * k.row_stride());
    keys = reinterpret_cast<uint32_t*>(pages + k.p.max_pages);
  }
};

// Octets of pages are dealt out in turns to the warps of all CTAs that share a row.
struct Octets {
  int worker, workers;

  __device__ __forceinline__ int first_page(int turn) const { return kOctet * (worker + turn * workers); }
};

// A CTA's row and its place in it.
struct TilesContext {
  const TilesKernelParams& k;
  const TilesParams& p;
  const TilesShared shared;
  const int warp, lane;
  int sequence = 0, head = 0;
  Peers peers = {};
  Octets octets = {};
  int length = 0, count = 0;  // tokens and pages of the sequence
  int keep = 0;               // pages to choose
  int first_competing = 0, end_competing = 0;
  // Pages up to here are scored and count in the softmax, those that are kept anyway at the sequence's begin, too. The
  // newest have no index yet, or one that is just being written.
  int end_counted = 0;

  __device__ __forceinline__ TilesContext(const TilesKernelParams& k, char* base, Work work)
      : k(k), p(k.p), shared(base, k, work), warp(threadIdx.x / 32), lane(threadIdx.x % 32) {}

  __device__ __forceinline__ const int32_t* table() const {
    return p.sequences.page_table + sequence * p.sequences.page_table_stride;
  }
  // Row of the selection.
  __device__ __forceinline__ int64_t row() const {
    return (static_cast<int64_t>(sequence) * p.num_kv_heads + head) * p.max_pages;
  }
  // A query head's scores in memory.
  __device__ __forceinline__ float* scores_of(int query_head) const {
    return p.scores + row() * k.group + static_cast<int64_t>(query_head) * p.max_pages;
  }
  // This warp's scores of a query head, octet after octet.
  __device__ __forceinline__ float* own_scores(int query_head) const {
    return shared.scores + query_head * k.row_stride() + warp * k.warp_pages;
  }
};

}  // namespace bicl::sparse
