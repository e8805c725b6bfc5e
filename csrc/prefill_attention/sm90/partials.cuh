// Tiles whose keys are split: pieces leave unnormalised partials, combine tickets merge them.
#pragma once

#include "pipeline.cuh"
#include "softmax.cuh"

namespace bicl::prefill::sm90 {

// A partial lies as the threads hold it, [D / 8][256 threads][4] float32 or [D / 16][256 threads][8] fp16, so that
// loads and stores coalesce. fp16 where ptxas then still finds registers for the products: the bytes decide how long
// few queries on a long prefix take. A row of it is scaled by a power of two so that its largest element lies in [1, 2);
// its reference and its sum carry the scale, and merging need not know.

// Slots and counters are numbered alike. The factor is 1: without it ptxas schedules the consumers' loop otherwise,
// 1.5 % slower at long prefixes, or serialises products for fp8 pages.
__device__ __forceinline__ int64_t partial_slot(const PrefillParams& p, int slot, int shift) {
  return static_cast<int64_t>(slot) * p.plan.piece_step + shift;
}

// 2^-e for the largest element of row i, with e kept where sums stay in range; `exponent` is e.
template <int N>
__device__ __forceinline__ float row_scale(const float (&o)[N], int i, float& exponent) {
  float most = 0.f;
#pragma unroll
  for (int n = 0; n < N / 4; ++n) most = fmaxf(most, fmaxf(fabsf(o[4 * n + 2 * i]), fabsf(o[4 * n + 2 * i + 1])));
  const int e = min(max((__float_as_int(RunningSoftmax::quad_max(most)) >> 23) - 127, -100), 100);
  exponent = static_cast<float>(e);
  return __int_as_float((127 - e) << 23);
}

template <int D, bool kHalf>
__device__ __forceinline__ void store_partial(const PrefillParams& p, const Assignment& a, int thread,
                                              const float (&o)[D / 2], const RunningSoftmax& softmax) {
  const SplitPlace place = SplitPlace::unpack(a.tile.split);
  const int64_t slot = partial_slot(p, place.slot, a.shift);
  float* partial = p.plan.partials + slot * (kPrefillRows * D);
  float scale[2] = {1.f, 1.f}, exponent[2] = {};
  if constexpr (kHalf) {
    uint4* out = reinterpret_cast<uint4*>(partial) + thread;
#pragma unroll
    for (int i = 0; i < 2; ++i) scale[i] = row_scale(o, i, exponent[i]);
#pragma unroll
    for (int n = 0; n < D / 16; ++n) {
      uint32_t w[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float x = o[8 * n + 2 * j], y = o[8 * n + 2 * j + 1];
        asm volatile("" : "+f"(x), "+f"(y)::"memory");  // in this order, as in store_rows
        w[j] = ptx::pack(x * scale[j % 2], y * scale[j % 2], __half{});
      }
      __stcg(out + n * 256, make_uint4(w[0], w[1], w[2], w[3]));
    }
  } else {
    float4* out = reinterpret_cast<float4*>(partial) + thread;
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
      __stcg(out + n * 256, make_float4(o[4 * n], o[4 * n + 1], o[4 * n + 2], o[4 * n + 3]));
  }
  if (thread % 4 == 0) {
    float2* rows = p.plan.partial_rows + slot * kPrefillRows + thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      __stcg(rows + 8 * i, make_float2(softmax.reference[i] + exponent[i], softmax.sum[i][0] * scale[i]));
  }
  __threadfence();
  __syncwarp();
  if (thread % 32 == 0) ptx::atomic_add_acq_rel(&p.plan.arrived[place.index * p.plan.piece_step + a.shift], 1);
}

template <int N>
__device__ __forceinline__ void add_word(float (&o)[N], int n, const float4& v, const float (&weight)[2]) {
  o[4 * n] = __fmaf_rn(v.x, weight[0], o[4 * n]);
  o[4 * n + 1] = __fmaf_rn(v.y, weight[0], o[4 * n + 1]);
  o[4 * n + 2] = __fmaf_rn(v.z, weight[1], o[4 * n + 2]);
  o[4 * n + 3] = __fmaf_rn(v.w, weight[1], o[4 * n + 3]);
}

template <int N>
__device__ __forceinline__ void add_word(float (&o)[N], int n, const uint4& v, const float (&weight)[2]) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float2 two = __half22float2(reinterpret_cast<const __half2&>(words[j]));
    o[8 * n + 2 * j] = __fmaf_rn(two.x, weight[j % 2], o[8 * n + 2 * j]);
    o[8 * n + 2 * j + 1] = __fmaf_rn(two.y, weight[j % 2], o[8 * n + 2 * j + 1]);
  }
}

// Merges kCombineDims columns of a split tile once all its pieces are stored. Every piece's ticket was drawn
// before this one, by a CTA that is running: the wait ends.
template <typename E, int D, bool kHalf>
__device__ __forceinline__ void combine(const PrefillParams& p, const Assignment& a, int thread) {
  using Word = std::conditional_t<kHalf, uint4, float4>;  // of a thread's four or two pairs of columns
  constexpr int kColumns = kHalf ? 16 : 8, kWords = kCombineDims / kColumns;
  const SplitPlace place = SplitPlace::unpack(a.tile.split);
  const int pieces = place.pieces, counter = place.index * p.plan.piece_step + a.shift;
  if (thread % 32 == 0) {
    int arrived;
    do {
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(arrived) : "l"(p.plan.arrived + counter) : "memory");
    } while (arrived != pieces * kConsumerWarps);
  }
  __syncwarp();

  const int local_row = thread / 32 * 16 + thread % 32 / 4;
  const int64_t first = partial_slot(p, place.slot, a.shift);
  const int64_t step = p.plan.piece_step;
  const float2* rows = p.plan.partial_rows + first * kPrefillRows + local_row;
  const Word* in = reinterpret_cast<const Word*>(p.plan.partials + first * (kPrefillRows * D)) + thread +
                   a.column / kColumns * 256;
  constexpr int kInFlight = D <= 128 ? 4 : 1;  // pieces; each load waits for L2
  Word v[kInFlight][kWords];
  float2 row[kInFlight][2];
  auto fetch = [&](int base) {
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int piece = min(base + i, pieces - 1);
      row[i][0] = __ldcg(rows + piece * step * kPrefillRows);
      row[i][1] = __ldcg(rows + piece * step * kPrefillRows + 8);
#pragma unroll
      for (int n = 0; n < kWords; ++n) v[i][n] = __ldcg(in + piece * step * (kPrefillRows * D / 4) + n * 256);
    }
  };
  fetch(0);
  RunningSoftmax merged;
#pragma unroll 4
  for (int i = 0; i < pieces; ++i) {
    merged.reference[0] = fmaxf(merged.reference[0], __ldcg(rows + i * step * kPrefillRows).x);
    merged.reference[1] = fmaxf(merged.reference[1], __ldcg(rows + i * step * kPrefillRows + 8).x);
  }
  float o[kCombineDims / 2] = {};
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
      for (int n = 0; n < kWords; ++n) add_word(o, n, v[i][n], weight);
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
