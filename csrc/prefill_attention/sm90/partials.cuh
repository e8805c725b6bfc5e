// Tiles whose keys are split: pieces leave unnormalised partials, combine tickets merge them.
#pragma once

#include "pipeline.cuh"
#include "softmax.cuh"

namespace bicl::prefill::sm90 {

// A partial lies as the threads hold it: [D / 8][256 threads][4], so that loads and stores coalesce.
__device__ __forceinline__ int64_t partial_slot(const PrefillParams& p, int slot, int head) {
  return static_cast<int64_t>(slot) * p.pages.num_kv_heads + head;
}

template <int D>
__device__ __forceinline__ void store_partial(const PrefillParams& p, const Assignment& a, int thread,
                                              const float (&o)[D / 2], const RunningSoftmax& softmax) {
  const SplitPlace place = SplitPlace::unpack(a.tile.split);
  const int64_t slot = partial_slot(p, place.slot, a.head);
  float4* out = reinterpret_cast<float4*>(p.plan.partials + slot * (kPrefillRows * D)) + thread;
#pragma unroll
  for (int n = 0; n < D / 8; ++n)
    __stcg(out + n * 256, make_float4(o[4 * n], o[4 * n + 1], o[4 * n + 2], o[4 * n + 3]));
  if (thread % 4 == 0) {
    float2* rows = p.plan.partial_rows + slot * kPrefillRows + thread / 32 * 16 + thread % 32 / 4;
    __stcg(rows, make_float2(softmax.reference[0], softmax.sum[0][0]));
    __stcg(rows + 8, make_float2(softmax.reference[1], softmax.sum[1][0]));
  }
  __threadfence();
  __syncwarp();
  if (thread % 32 == 0) ptx::atomic_add_acq_rel(&p.plan.arrived[place.index * p.pages.num_kv_heads + a.head], 1);
}

// Merges kCombineDims columns of a split tile once all its pieces are stored. Every piece's ticket was drawn
// before this one, by a CTA that is running: the wait ends.
template <typename E, int D>
__device__ __forceinline__ void combine(const PrefillParams& p, const Assignment& a, int thread) {
  constexpr int kColumns = kCombineDims / 8;
  const SplitPlace place = SplitPlace::unpack(a.tile.split);
  const int pieces = place.pieces, counter = place.index * p.pages.num_kv_heads + a.head;
  if (thread % 32 == 0) {
    int arrived;
    do {
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(arrived) : "l"(p.plan.arrived + counter) : "memory");
    } while (arrived != pieces * kConsumerWarps);
  }
  __syncwarp();

  const int local_row = thread / 32 * 16 + thread % 32 / 4;
  const int64_t first = partial_slot(p, place.slot, a.head);
  const int64_t step = p.pages.num_kv_heads;
  const float2* rows = p.plan.partial_rows + first * kPrefillRows + local_row;
  const float4* in = reinterpret_cast<const float4*>(p.plan.partials + first * (kPrefillRows * D)) + thread +
                     a.column / 8 * 256;
  constexpr int kInFlight = D <= 128 ? 4 : 1;  // pieces; each load waits for L2
  float4 v[kInFlight][kColumns];
  float2 row[kInFlight][2];
  auto fetch = [&](int base) {
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int piece = min(base + i, pieces - 1);
      row[i][0] = __ldcg(rows + piece * step * kPrefillRows);
      row[i][1] = __ldcg(rows + piece * step * kPrefillRows + 8);
#pragma unroll
      for (int n = 0; n < kColumns; ++n)
        v[i][n] = __ldcg(in + piece * step * (kPrefillRows * D / 4) + n * 256);
    }
  };
  fetch(0);
  RunningSoftmax merged;
#pragma unroll 4
  for (int i = 0; i < pieces; ++i) {
    merged.reference[0] = fmaxf(merged.reference[0], __ldcg(rows + i * step * kPrefillRows).x);
    merged.reference[1] = fmaxf(merged.reference[1], __ldcg(rows + i * step * kPrefillRows + 8).x);
  }
  float o[kColumns * 4] = {};
  for (int base = 0; base < pieces; base += kInFlight) {
    if (base > 0) fetch(base);
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (base + i >= pieces) break;
      const float weight[2] = {exp2_fast(row[i][0].x - merged.reference[0]),
                               exp2_fast(row[i][1].x - merged.reference[1])};
      merged.sum[0][0] = __fmaf_rn(row[i][0].y, weight[0], merged.sum[0][0]);
      merged.sum[1][0] = __fmaf_rn(row[i][1].y, weight[1], merged.sum[1][0]);
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        o[4 * n] = __fmaf_rn(v[i][n].x, weight[0], o[4 * n]);
        o[4 * n + 1] = __fmaf_rn(v[i][n].y, weight[0], o[4 * n + 1]);
        o[4 * n + 2] = __fmaf_rn(v[i][n].z, weight[1], o[4 * n + 2]);
        o[4 * n + 3] = __fmaf_rn(v[i][n].w, weight[1], o[4 * n + 3]);
      }
    }
  }
  const float inverse[2] = {merged.inverse(0, p.pages.v_scale), merged.inverse(1, p.pages.v_scale)};
  store_rows<E>(p, a.tile, a.head, a.tile.row + local_row, a.column, o, inverse);
  const float lse[2] = {merged.lse(0), merged.lse(1)};
  if (a.column == 0) store_lse(p, a.tile, a.head, a.tile.row + local_row, lse);
  __syncwarp();
  if (thread % 32 == 0) {
    constexpr int kReaders = kConsumerWarps * (D / kCombineDims);
    if (ptx::atomic_add_acq_rel(&p.plan.combined[counter], 1) == kReaders - 1)
      p.plan.arrived[counter] = p.plan.combined[counter] = 0;
  }
}

}  // namespace bicl::prefill::sm90
