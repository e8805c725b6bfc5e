// What the threads of the planning CTA share.
#pragma once

#include "../common/ptx.cuh"
#include "params.h"

namespace bicl::prefill {

constexpr int kPlanThreads = 256;
constexpr int kPlanWarps = kPlanThreads / 32;
constexpr int kBuckets = 16;  // cost classes; within one, sequences stay together for L2
constexpr int kCandidates = 32;  // piece lengths tried, from a CTA's share to three times that

struct PlanShared {
  int warp_sums[kPlanWarps];
  long long warp_work[kPlanWarps], warp_keys[kPlanWarps];
  int warp_max[kPlanWarps], warp_min[kPlanWarps];
  int candidate_pieces[kCandidates];
  int num_splits, num_partials;
  int counts[kPlanThreads * (kBuckets + 1)];  // [bucket][thread], see count_at
  int first_tile[1];                      // [batch + 1]
};

// Counts are scanned kBuckets to a thread: a word of padding after each run keeps the banks apart.
__device__ __forceinline__ int& count_at(PlanShared& s, int i) { return s.counts[i + i / kBuckets]; }

// Exclusive prefix sum over the block; `total` is the sum.
__device__ int block_exclusive_sum(int value, PlanShared& s, int& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int inclusive = value;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(~0u, inclusive, d);
    if (lane >= d) inclusive += other;
  }
  __syncthreads();
  if (lane == 31) s.warp_sums[warp] = inclusive;
  __syncthreads();
  int before = 0;
  total = 0;
#pragma unroll
  for (int w = 0; w < kPlanWarps; ++w) {
    if (w < warp) before += s.warp_sums[w];
    total += s.warp_sums[w];
  }
  return before + inclusive - value;
}

}  // namespace bicl::prefill
