// The pages that one stratum takes, by one warp: what the query heads of the group agree on, and the best by that.
#pragma once

#include "tiles_cta.cuh"

namespace bicl::sparse {

// Greater scores have greater keys. -0 equals 0, NaN is least.
__device__ __forceinline__ uint32_t key_of(float score) {
  if (score != score) return 0;
  const uint32_t bits = __float_as_uint(score + 0.f);
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

template <typename Context>
class Picker {
  using Shape = typename Context::Shape;
  static constexpr int kPerLane = Shape::kStratum / 32;  // pages of a stratum: lane, lane + 32, ..

 public:
  __device__ __forceinline__ explicit Picker(const Context& c) : c_(c) {}

  // An octet's scores of four heads, and their sums as logarithms; a lane has the head query_head and page `place`, whose
  // score is -inf where there is none.
  __device__ __forceinline__ void put(int buffer, int octet, int query_head, int place, float score) const {
    const float sum = octet_sum(score);
    if (query_head >= c_.k.group) return;
    c_.scores(buffer, query_head)[kOctet * octet + place] = score;
    if (place == 0) c_.sums(buffer, query_head)[octet] = sum;
  }
  // The same of first pages, of which the sums are all that is needed.
  __device__ __forceinline__ void put_firsts(int query_head, int place, float score) const {
    const float sum = octet_sum(score);
    if (query_head >= c_.k.group || place > 0) return;
    float& firsts = c_.shared.firsts[query_head];
    const float most = fmaxf(fmaxf(firsts, sum), kLeast);
    firsts = most + __log2f(ptx::exp2_approx(firsts - most) + ptx::exp2_approx(sum - most));
  }
  __device__ __forceinline__ void clear_firsts() const {
#pragma unroll 1
    for (int head = c_.lane; head < c_.k.group; head += 32) c_.shared.firsts[head] = -INFINITY;
    __syncwarp();
  }

  // The lane's pages of a stratum, asked for before scores are there.
  struct Candidates {
    int position[kPerLane];  // -1: none
    int32_t page[kPerLane];
  };
  __device__ __forceinline__ Candidates candidates(int stratum) const {
    Candidates own;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      own.position[i] = c_.row.page(stratum, c_.lane + 32 * i);
      own.page[i] = own.position[i] < 0 ? 0 : c_.table()[own.position[i]];
    }
    return own;
  }

  // put(number, position, page) for the `quota` best, numbered from 0 by position.
  template <typename Put>
  __device__ __forceinline__ void pick(int buffer, const Candidates& own, int quota, const Put& put) const {
    if (quota == 0) return;
    float score[kPerLane];
    agree(buffer, score);
    uint32_t key[kPerLane], least = ~0u, most = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      key[i] = own.position[i] < 0 ? 0 : key_of(score[i]);
      if (own.position[i] >= 0) least = min(least, key[i]);
      most = max(most, key[i]);
    }
    // The greatest key that as many reach as are taken, or more; below it more still, above it fewer.
    least = __reduce_min_sync(~0u, least);
    most = __reduce_max_sync(~0u, most) + 1;
    int reached = -1;
#pragma unroll 1
    while (most - least > 1 && reached != quota) {
      const uint32_t middle = least + (most - least) / 2;
      int count = 0;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) count += __popc(__ballot_sync(~0u, key[i] >= middle));
      if (count < quota) most = middle;
      else least = middle, reached = count;
    }
    int equal = quota;  // that are taken
    if (reached != quota) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) equal -= __popc(__ballot_sync(~0u, key[i] > least));
    }
    const uint32_t lower_lanes = (1u << c_.lane) - 1;
    int number = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const uint32_t equals = __ballot_sync(~0u, key[i] == least);
      const bool is_taken = key[i] > least || (key[i] == least && __popc(equals & lower_lanes) < equal);
      equal -= __popc(equals);
      const uint32_t taken = __ballot_sync(~0u, is_taken);
      if (is_taken) put(number + __popc(taken & lower_lanes), own.position[i], own.page[i]);
      number += __popc(taken);
    }
  }

 private:
  static __device__ __forceinline__ float octet_sum(float score) {
    const float most = fmaxf(lanes_max(score, 4, 16), kLeast);
    return most + __log2f(lanes_sum(ptx::exp2_approx(score - most), 4, 16));
  }

  // Of the heads: their greatest score, their sum, or the sum of their softmaxes over the stratum and the first pages, so
  // that a head that looks at little else has little to say.
  __device__ __forceinline__ void agree(int buffer, float (&all)[kPerLane]) const {
    const Combine combine = c_.p.combine;
    const int group = c_.k.group;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) all[i] = combine == Combine::kMax ? -INFINITY : 0.f;
#pragma unroll 1
    for (int first = 0; first < group; first += 4) {
      const float total = combine == Combine::kSoftmax ? total_of(buffer, first + c_.lane / 8) : 0.f;
#pragma unroll 1
      for (int head = first; head < min(first + 4, group); ++head) {
        const float* scores = c_.scores(buffer, head) + c_.lane;
        const float own_total = __shfl_sync(~0u, total, 8 * (head - first));
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
          const float score = scores[32 * i];
          if (combine == Combine::kMax) all[i] = fmaxf(all[i], score);
          else all[i] += combine == Combine::kSum ? score : ptx::exp2_approx(score - own_total);
        }
      }
    }
  }

  // The logarithm of a head's sum over the stratum and the first pages, by eight lanes.
  __device__ __forceinline__ float total_of(int buffer, int query_head) const {
    constexpr int kOctets = Shape::kStratum / kOctet;
    const bool is_own = query_head < c_.k.group;
    const float* sums = c_.sums(buffer, is_own ? query_head : 0) + c_.lane % 8;
    const float firsts = c_.shared.firsts[is_own ? query_head : 0];
    float value[kOctets / 8], most = fmaxf(firsts, kLeast), sum = 0.f;
#pragma unroll
    for (int i = 0; i < kOctets / 8; ++i) {
      value[i] = sums[8 * i];
      most = fmaxf(most, value[i]);
    }
    most = lanes_max(most, 1, 4);
#pragma unroll
    for (int i = 0; i < kOctets / 8; ++i) sum += ptx::exp2_approx(value[i] - most);
    return most + __log2f(lanes_sum(sum, 1, 4) + ptx::exp2_approx(firsts - most));
  }

  const Context& c_;
};

}  // namespace bicl::sparse
