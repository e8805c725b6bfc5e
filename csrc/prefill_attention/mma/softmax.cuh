// The running softmax of a thread's two rows, by the maximum of each block.
#pragma once

#include "../rows.cuh"

namespace bicl::prefill::mma {

constexpr float kFirstMax = -1e30f;  // finite: a fully masked row needs no special case
// The running maximum may lag by this much (in log2) before the output is rescaled: P stays below 2^8 and
// sums are float32, so nothing is lost, and most blocks skip the multiplies.
constexpr float kLazyLog2 = 8.f;

// Running softmax of two rows. Sums are per thread until `finish`.
struct Softmax {
  float max[2] = {kFirstMax, kFirstMax};
  float sum[2] = {0.f, 0.f};

  // Turns scores into probabilities; returns the factors that older sums and outputs must take.
  template <int N>
  __device__ __forceinline__ void update(float (&s)[N], float log2_scale, float lazy, float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float m0 = fmaxf(s[2 * i], s[2 * i + 1]), m1 = fmaxf(s[4 + 2 * i], s[4 + 2 * i + 1]);
#pragma unroll
      for (int n = 2; n < N / 4; n += 2) {
        m0 = fmaxf(m0, fmaxf(s[4 * n + 2 * i], s[4 * n + 2 * i + 1]));
        m1 = fmaxf(m1, fmaxf(s[4 * n + 4 + 2 * i], s[4 * n + 4 + 2 * i + 1]));
      }
      float m = fmaxf(m0, m1);
      m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
      m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
      const bool moves = m > max[i] + lazy;
      factor[i] = moves ? exp2_fast((max[i] - m) * log2_scale) : 1.f;
      max[i] = moves ? m : max[i];
      const float scaled_max = max[i] * log2_scale;
      float sum0 = 0.f, sum1 = 0.f;
#pragma unroll
      for (int n = 0; n < N / 4; ++n) {
        float& a = s[4 * n + 2 * i];
        float& b = s[4 * n + 2 * i + 1];
        a = exp2_fast(__fmaf_rn(a, log2_scale, -scaled_max));
        b = exp2_fast(__fmaf_rn(b, log2_scale, -scaled_max));
        sum0 += a;
        sum1 += b;
      }
      sum[i] = __fmaf_rn(sum[i], factor[i], sum0 + sum1);
    }
  }

  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[i] += __shfl_xor_sync(~0u, sum[i], 1);
      sum[i] += __shfl_xor_sync(~0u, sum[i], 2);
    }
  }

  // Factor of the unnormalised output; rows that saw no key give exactly zero.
  __device__ __forceinline__ float inverse(int i, float v_scale) const {
    return sum[i] > 0.f ? __fdividef(v_scale, sum[i]) : sum[i] == 0.f ? 0.f : sum[i];
  }

  __device__ __forceinline__ float lse(int i, float log2_scale) const {
    return sum[i] == 0.f ? -INFINITY : (max[i] * log2_scale + log2f(sum[i])) * kLn2;
  }
};

template <int N>
__device__ __forceinline__ void rescale(float (&o)[N], const float (&factor)[2]) {
  if (!__any_sync(~0u, factor[0] != 1.f || factor[1] != 1.f)) return;
#pragma unroll
  for (int i = 0; i < N; ++i) o[i] *= factor[(i >> 1) & 1];
}

}  // namespace bicl::prefill::mma
