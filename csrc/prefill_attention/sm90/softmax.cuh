// The running softmax of a thread's two rows, without a maximum in most blocks.
//
// Exponents are taken from a reference that lies kHeadroom above the row's largest score when it was set. While the
// scores of a block stay below it, as nearly all do, every exponent is negative: one AND over the sign bits says
// so, and neither the maximum of the block nor its way through the quad is needed. Otherwise the reference rises,
// and older sums and outputs take a factor. Probabilities are at most 1 and sums are float32, so the headroom
// costs no precision. A row's first reference comes from all of its own first block, whose largest probability is
// then a power of two, which bf16 keeps; later ones rise by whole numbers. Masked or not, a block gives a row the same
// bits.
//
// A block goes through this in one part or two, [kFirst, kLast) of the scores that a thread holds.
#pragma once

#include "../rows.cuh"

namespace bicl::prefill::sm90 {

constexpr float kHeadroom = 8.f;         // in log2
constexpr float kNoReference = -1e30f;  // the row has seen no key; finite: its masked scores give 0

struct RunningSoftmax {
  float reference[2] = {kNoReference, kNoReference};  // in log2
  float sum[2][2] = {};                               // in two parts, and per thread until `finish`

  __device__ __forceinline__ static float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
  }

  template <int kFirst, int kLast, int N>
  __device__ __forceinline__ static float row_max(const float (&s)[N], int i) {
    float m0 = fmaxf(s[kFirst + 2 * i], s[kFirst + 2 * i + 1]), m1 = fmaxf(s[kFirst + 4 + 2 * i], s[kFirst + 5 + 2 * i]);
#pragma unroll
    for (int n = 2; n < (kLast - kFirst) / 4; n += 2) {
      m0 = fmaxf(m0, fmaxf(s[kFirst + 2 * i + 4 * n], s[kFirst + 2 * i + 4 * n + 1]));
      m1 = fmaxf(m1, fmaxf(s[kFirst + 2 * i + 4 * n + 4], s[kFirst + 2 * i + 4 * n + 5]));
    }
    return quad_max(fmaxf(m0, m1));
  }

  // What follows from a reference of row i that rose by `delta`: exponents of this part, probabilities and sums of
  // earlier ones.
  template <int kFirst, int kLast, int N>
  __device__ __forceinline__ void raise(float (&x)[N], int i, float delta, float factor) {
#pragma unroll
    for (int n = 0; n < kLast / 4; ++n)
#pragma unroll
      for (int j = 4 * n + 2 * i; j < 4 * n + 2 * i + 2; ++j) x[j] = n < kFirst / 4 ? x[j] * factor : x[j] - delta;
    sum[i][0] *= factor;
    sum[i][1] *= factor;
  }

  // Exponents [kFirst, kLast) of the thread to probabilities.
  template <int kFirst, int kLast, int N>
  __device__ __forceinline__ void exponentiate(float (&x)[N]) {
#pragma unroll
    for (int n = kFirst / 4; n < kLast / 4; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[4 * n + i] = exp2_fast(x[4 * n + i]);
        sum[i / 2][i % 2] += x[4 * n + i];
      }
  }

  // A tile's first block: scores, masked ones -inf, to exponents. The first part rounds as update_masked does.
  template <int kSplit, int N>
  __device__ __forceinline__ void begin(float (&s)[N], float log2_scale) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float most = row_max<0, N>(s, i) * log2_scale;
      if (most > -INFINITY) reference[i] = most + kHeadroom;
    }
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float r = reference[j / 2 % 2];
      s[j] = j < kSplit ? __fadd_rn(__fmul_rn(s[j], log2_scale), -r) : __fmaf_rn(s[j], log2_scale, -r);
    }
  }

  // A part's scores to exponents; every row has seen a key. Returns whether older outputs take `factor`, which a second
  // part multiplies.
  template <int kFirst, int kLast, int N>
  __device__ __forceinline__ bool update(float (&s)[N], float log2_scale, float (&factor)[2]) {
    uint32_t below[4] = {~0u, ~0u, ~0u, ~0u};
#pragma unroll
    for (int n = kFirst / 4; n < kLast / 4; ++n)
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        float& a = s[4 * n + i];
        float& b = s[4 * n + i + 1];
        a = __fmaf_rn(a, log2_scale, -reference[i / 2]);
        b = __fmaf_rn(b, log2_scale, -reference[i / 2]);
        below[n % 2 * 2 + i / 2] &= __float_as_uint(a) & __float_as_uint(b);
      }
    const bool rises = __any_sync(~0u, static_cast<int>(below[0] & below[1] & below[2] & below[3]) >= 0);
    if (rises) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float most = row_max<kFirst, kLast>(s, i);
        const float delta = most >= 0.f ? ceilf(most + kHeadroom) : 0.f;
        const float by = exp2_fast(-delta);
        factor[i] = kFirst > 0 ? factor[i] * by : by;
        reference[i] += delta;
        raise<kFirst, kLast>(s, i, delta, by);
      }
    } else if (kFirst == 0 && kLast < N) {
      factor[0] = factor[1] = 1.f;
    }
    return rises;
  }

  // The same where scores may be masked (-inf) and rows may see their first key: for those, all of the block counts.
  template <int kFirst, int kLast, int N>
  __device__ __forceinline__ bool update_masked(float (&s)[N], float log2_scale, float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool first = reference[i] == kNoReference;
      const float base = first ? 0.f : reference[i];
      float highest = row_max<kFirst, kLast>(s, i);
      if constexpr (kFirst == 0 && kLast < N) {
        const float rest = row_max<kLast, N>(s, i);
        if (first) highest = fmaxf(highest, rest);
      }
      const float most = __fmaf_rn(highest, log2_scale, -base);
      const bool rises = first ? most > -INFINITY : most >= 0.f;
      const float above = rises ? most + kHeadroom : 0.f;
      const float delta = first ? above : ceilf(above);
      const float by = first ? 1.f : exp2_fast(-delta);
      factor[i] = kFirst > 0 ? factor[i] * by : by;
      if (rises) reference[i] = base + delta;
#pragma unroll
      for (int n = kFirst / 4; n < kLast / 4; ++n) {
        s[4 * n + 2 * i] = __fmaf_rn(s[4 * n + 2 * i], log2_scale, -base);
        s[4 * n + 2 * i + 1] = __fmaf_rn(s[4 * n + 2 * i + 1], log2_scale, -base);
      }
      raise<kFirst, kLast>(s, i, delta, by);
    }
    return __any_sync(~0u, factor[0] != 1.f || factor[1] != 1.f);
  }

  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[i][0] += sum[i][1];
      sum[i][0] += __shfl_xor_sync(~0u, sum[i][0], 1);
      sum[i][0] += __shfl_xor_sync(~0u, sum[i][0], 2);
    }
  }

  // Factor of the unnormalised output; rows that saw no key give exactly zero.
  __device__ __forceinline__ float inverse(int i, float v_scale) const {
    const float total = sum[i][0];
    return total > 0.f ? __fdividef(v_scale, total) : total == 0.f ? 0.f : total;
  }

  __device__ __forceinline__ float lse(int i) const {
    return sum[i][0] == 0.f ? -INFINITY : (reference[i] + log2f(sum[i][0])) * kLn2;
  }
};

}  // namespace bicl::prefill::sm90
