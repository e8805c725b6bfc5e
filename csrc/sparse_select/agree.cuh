// From each query head's scores to one key a page: each head's softmax over all pages that count, added over the group.
//
// A warp normalises its own pages first, as soon as it has scored them, and tells every CTA of the cluster its greatest
// score and its sum; one barrier of the cluster later each warp knows the factor of its own.
#pragma once

#include "tiles_cta.cuh"

namespace bicl::sparse {

constexpr float kLog2e = 1.4426950408889634f;

class Agreement {
 public:
  __device__ __forceinline__ explicit Agreement(const TilesContext& c)
      : c_(c), head_(c.lane / kOctet), place_(c.lane % kOctet) {}

  // In place of scoring: from memory.
  __device__ __forceinline__ void read_scores() const {
#pragma unroll 1
    for (int first = 0; first < c_.k.group; first += kHeads) {
      const int query_head = first + head_;
      if (query_head >= c_.k.group) continue;
      float* scores = c_.own_scores(query_head) + place_;
      const float* source = c_.scores_of(query_head) + place_;
#pragma unroll 4
      for (int turn = 0; c_.octets.first_page(turn) < c_.count; ++turn) {
        const int page = c_.octets.first_page(turn);
        if (page + place_ < c_.count) scores[kOctet * turn] = source[page] * kLog2e;
      }
    }
    __syncwarp();
  }

  // Scores to exp(score - the warp's greatest), and the factor that makes them a softmax over all pages.
  __device__ __forceinline__ void normalise() const {
#pragma unroll 1
    for (int first = 0; first < c_.k.group; first += kHeads) send_stats(first + head_);
    c_.peers.exchange();
#pragma unroll 1
    for (int first = 0; first < c_.k.group; first += kHeads) put_factor(first + head_);
    __syncwarp();
  }

  // One key a page, and the range of those that compete, to the first CTA.
  __device__ __forceinline__ void send_keys() const {
    uint32_t low = kAlways, high = 0;
#pragma unroll 1
    for (int turn = 0; c_.octets.first_page(turn) < c_.count; turn += kHeads) {
      const int page = c_.octets.first_page(turn + head_) + place_;
      if (page >= c_.count) continue;
      uint32_t key = kAlways;
      if (page >= c_.first_competing && page < c_.end_competing) {
        key = key_of(agreed(kOctet * turn + c_.lane));
        low = min(low, key);
        high = max(high, key);
      }
      c_.peers.send(c_.shared.keys + page, key, 0);
    }
    low = __reduce_min_sync(~0u, low);
    high = __reduce_max_sync(~0u, high);
    if (c_.lane == 0) c_.peers.send(c_.shared.ranges + c_.octets.worker, low, high, 0);
  }

 private:
  static constexpr int kHeads = 32 / kOctet;  // a lane has a head and a place in an octet

  // Over the lanes of a head.
  static __device__ __forceinline__ float head_max(float value) {
#pragma unroll
    for (int step = kOctet / 2; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, step));
    return value;
  }
  static __device__ __forceinline__ float head_sum(float value) {
#pragma unroll
    for (int step = kOctet / 2; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    return value;
  }

  __device__ __forceinline__ void send_stats(int query_head) const {
    const int end = query_head < c_.k.group ? c_.end_counted - place_ : 0;  // of first_page
    float* scores = c_.own_scores(query_head) + place_;
    float most = -INFINITY, sum = 0.f;
#pragma unroll 4
    for (int turn = 0; c_.octets.first_page(turn) < end; ++turn) most = fmaxf(most, scores[kOctet * turn]);
    most = head_max(most);
#pragma unroll 4
    for (int turn = 0; c_.octets.first_page(turn) < end; ++turn) {
      const float weight = ptx::exp2_approx(scores[kOctet * turn] - most);
      scores[kOctet * turn] = weight;
      sum += weight;
    }
    sum = head_sum(sum);
    if (query_head < c_.k.group && place_ < c_.peers.count)
      c_.peers.send(stats_of(query_head) + c_.octets.worker, most, sum, place_);
  }

  __device__ __forceinline__ void put_factor(int query_head) const {
    const bool is_own = query_head < c_.k.group;
    const float2* stats = stats_of(is_own ? query_head : 0);
    float most = -INFINITY, all = 0.f;
#pragma unroll 4
    for (int w = place_; w < c_.octets.workers; w += kOctet) most = fmaxf(most, stats[w].x);
    most = head_max(most);
#pragma unroll 4
    for (int w = place_; w < c_.octets.workers; w += kOctet)
      all += stats[w].x == -INFINITY ? 0.f : stats[w].y * ptx::exp2_approx(stats[w].x - most);
    all = head_sum(all);
    if (is_own && place_ == 0)
      factors()[query_head] = __fdividef(ptx::exp2_approx(stats[c_.octets.worker].x - most), all);
  }

  __device__ __forceinline__ float agreed(int own_place) const {
    const float* scores = c_.own_scores(0) + own_place;
    const int stride = c_.k.row_stride();
    float all = c_.p.combine == Combine::kMax ? -INFINITY : 0.f;
#pragma unroll 4
    for (int h = 0; h < c_.k.group; ++h) {
      const float score = scores[h * stride];
      if (c_.p.combine == Combine::kMax) all = fmaxf(all, score);
      else all += c_.p.combine == Combine::kSum ? score : score * factors()[h];
    }
    return all;
  }

  __device__ __forceinline__ float2* stats_of(int query_head) const {
    return c_.shared.stats + query_head * TilesShared::kStatStride;
  }
  __device__ __forceinline__ float* factors() const { return c_.shared.factors + c_.warp * c_.k.group; }

  const TilesContext& c_;
  const int head_, place_;
};

}  // namespace bicl::sparse
