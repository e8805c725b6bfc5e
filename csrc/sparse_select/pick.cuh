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

// kStratum: pages of one. kPlain: a group of at most four query heads.
template <int kStratum, bool kPlain>
class Picker {
  static constexpr int kPerLane = kStratum / 32;

 public:
  __device__ __forceinline__ explicit Picker(const TilesContext& c) : c_(c) {}

  __device__ __forceinline__ void clear_firsts() const {
#pragma unroll 1
    for (int head = c_.lane; head < c_.k.group; head += 32) c_.shared.firsts[head] = kLeast;
  }

  // Adds an octet of the first pages, which this warp has scored, to their heads' sums.
  __device__ __forceinline__ void add_firsts(int turn) const {
    __syncwarp();
#pragma unroll 1
    for (int head = c_.lane; head < c_.k.group; head += 32) {
      const float* scores = c_.scores(0, head) + kStratum;
      const float before = c_.shared.firsts[head];
      const int count = min(kOctet, c_.row.begin - turn * kOctet);
      float most = before, sum = 0.f;
      for (int i = 0; i < count; ++i) most = fmaxf(most, scores[i]);
      for (int i = 0; i < count; ++i) sum += ptx::exp2_approx(scores[i] - most);
      c_.shared.firsts[head] = most + __log2f(sum + ptx::exp2_approx(before - most));
    }
    __syncwarp();
  }

  // The lane's page of a turn's stratum, asked for before scores are there.
  struct Candidate {
    int stratum, place;
    int position;  // -1: none
    int32_t page;
  };
  __device__ __forceinline__ Candidate candidate(int turn) const {
    const int stratum = c_.rank + turn * c_.splits(), place = 32 * c_.picker() + c_.lane;
    const int position = c_.row.page(stratum, place);
    return {stratum, place, position, position < 0 ? 0 : c_.table()[position]};
  }

  // put(number, position, page) if it is taken; numbers go from the best to the worst of the stratum, and on from the
  // stratum before.
  template <typename Put>
  __device__ __forceinline__ void pick(int turn, const Candidate& own, const Put& put) const {
    const float score = agreed(turn, own);  // by all lanes
    const uint32_t key = own.position < 0 ? 0 : key_of(score);
    reinterpret_cast<uint32_t*>(c_.shared.keys)[own.place] = key;
    ptx::named_barrier(kPickersOnly, kStratum);
    int rank = 0;
#pragma unroll
    for (int four = 0; four < kStratum / 4; ++four) {
      const uint4 keys = c_.shared.keys[four];
      const uint32_t others[4] = {keys.x, keys.y, keys.z, keys.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) rank += others[i] > key || (others[i] == key && 4 * four + i < own.place);
    }
    if (own.position >= 0 && rank < c_.row.quota(own.stratum))
      put(c_.row.begin + c_.row.before(own.stratum) + rank, own.position, own.page);
  }

 private:
  static constexpr int kPickersOnly = 1;  // a named barrier

  // Of the heads: their greatest score, their sum, or the sum of their softmaxes over the stratum and the first pages, so
  // that a head that looks at little else has little to say.
  __device__ __forceinline__ float agreed(int turn, const Candidate& own) const {
    const Combine combine = c_.p.combine;
    const int size = c_.row.size(own.stratum);
    float all = combine == Combine::kMax ? -INFINITY : 0.f;
    const auto add = [&](int query_head) {
      const float* scores = c_.scores(turn, query_head);
      const float own_score = scores[own.place];
      if (combine != Combine::kSoftmax) {
        all = combine == Combine::kMax ? fmaxf(all, own_score) : all + own_score;
        return;
      }
      const float firsts = c_.shared.firsts[query_head];
      float score[kPerLane], most = kLeast, sum = 0.f;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        score[i] = c_.lane + 32 * i < size ? scores[c_.lane + 32 * i] : kLeast;
        most = fmaxf(most, score[i]);
      }
      most = fmaxf(warp_max(most), firsts);
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) sum += ptx::exp2_approx(score[i] - most);
      sum = warp_sum(sum) + ptx::exp2_approx(firsts - most);
      all += ptx::exp2_approx(own_score - most) / sum;
    };
    if (kPlain && c_.k.group == 4) {
#pragma unroll
      for (int head = 0; head < 4; ++head) add(head);
    } else {
#pragma unroll 1
      for (int head = 0; head < c_.k.group; ++head) add(head);
    }
    return all;
  }

  const TilesContext& c_;
};

}  // namespace bicl::sparse
