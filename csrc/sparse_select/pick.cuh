// The pages that one stratum takes, by a warp for 32 of them: what the query heads of the group agree on, and the best by
// that.
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

  // The lane's page of a stratum, asked for before scores are there.
  struct Candidate {
    int stratum, place;
    int position;  // -1: none
    int32_t page;
  };
  __device__ __forceinline__ Candidate candidate(int stratum) const {
    const int place = 32 * c_.picker() + c_.lane, position = c_.row.page(stratum, place);
    return {stratum, place, position, position < 0 ? 0 : c_.table()[position]};
  }

  // put(number, position, page) if it is among the `quota` best, numbered from the best on. All warps that pick.
  template <typename Put>
  __device__ __forceinline__ void pick(int buffer, const Candidate& own, int quota, const Put& put) const {
    const float score = agreed(buffer, own.place);  // by all lanes
    const uint32_t key = own.position < 0 ? 0 : key_of(score);
    uint4* fours = c_.keys(buffer);
    reinterpret_cast<uint32_t*>(fours)[own.place] = key;
    wait_others();
    int rank = 0;
#pragma unroll 1
    for (int warp = 0; warp < Shape::kPickers; ++warp) {
      // Of equal ones the earlier comes first. Without a branch: lanes would take it apart.
      const int before = warp < c_.picker() ? 32 : warp > c_.picker() ? 0 : c_.lane;
#pragma unroll
      for (int four = 0; four < 8; ++four) {
        const uint4 keys = fours[8 * warp + four];
        const uint32_t others[4] = {keys.x, keys.y, keys.z, keys.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) rank += others[i] >= key + (4 * four + i < before ? 0 : 1);
      }
    }
    if (own.position >= 0 && rank < quota) put(rank, own.position, own.page);
  }

  // The warps that pick, for each other.
  __device__ __forceinline__ void wait_others() const { ptx::named_barrier(1, 32 * Shape::kPickers); }

 private:
  static __device__ __forceinline__ float octet_sum(float score) {
    const float most = fmaxf(lanes_max(score, 4, 16), kLeast);
    return most + __log2f(lanes_sum(ptx::exp2_approx(score - most), 4, 16));
  }

  // Of the heads: their greatest score, their sum, or the sum of their softmaxes over the stratum and the first pages, so
  // that a head that looks at little else has little to say.
  __device__ __forceinline__ float agreed(int buffer, int place) const {
    const Combine combine = c_.p.combine;
    const int group = c_.k.group;
    float all = combine == Combine::kMax ? -INFINITY : 0.f;
    if (combine != Combine::kSoftmax) {
#pragma unroll 1
      for (int head = 0; head < group; ++head) {
        const float score = c_.scores(buffer, head)[place];
        all = combine == Combine::kMax ? fmaxf(all, score) : all + score;
      }
      return all;
    }
#pragma unroll 1
    for (int first = 0; first < group; first += 4) {
      const float total = total_of(buffer, first + c_.lane / 8);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float score = c_.scores(buffer, min(first + i, group - 1))[place];
        const float share = ptx::exp2_approx(score - __shfl_sync(~0u, total, 8 * i));
        all += first + i < group ? share : 0.f;
      }
    }
    return all;
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
