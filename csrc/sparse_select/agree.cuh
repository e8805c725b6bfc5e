// From each query head's scores to one key a page: each head's softmax over all pages that count, added over the group.
//
// A warp normalises its own pages first, as soon as it has scored them. Sums go from the warps to their CTA and from
// there to every CTA of the cluster; one barrier of the cluster later each warp knows the factor of its own. Loops stay
// rolled: a CTA runs through all this once, and waits for its instructions more than for anything else.
#pragma once

#include "tiles_cta.cuh"

namespace bicl::sparse {

constexpr float kLog2e = 1.4426950408889634f;

template <bool kPlain>
class Agreement {
 public:
  __device__ __forceinline__ explicit Agreement(const TilesContext& c)
      : c_(c), head_(c.lane / kOctet), place_(c.lane % kOctet) {}

  // In place of scoring: from memory.
  __device__ __forceinline__ void read_scores() const {
#pragma unroll 1
    for (int first = 0; first < rows(); first += kHeads) {
      const int query_head = first + head_;
      if (query_head >= c_.k.group) continue;
      float* scores = c_.own_scores(query_head) + place_;
      const float* source = c_.scores_of(query_head) + place_;
#pragma unroll 1
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
    for (int first = 0; first < rows(); first += kHeads) put_sum(first + head_);
    __syncthreads();
    if (c_.peers.count > 1) {
      if (c_.warp == 0) {
#pragma unroll 1
        for (int first = 0; first < rows(); first += kHeads) send_sum(first + head_);
      }
      c_.peers.exchange();
    }
#pragma unroll 1
    for (int first = 0; first < rows(); first += kHeads) put_factor(first + head_);
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

  // Of the group, in steps of kHeads.
  __device__ __forceinline__ int rows() const { return kPlain ? kHeads : c_.k.group; }

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

  // The warp's own, as a logarithm; its greatest score stands in for the factor until the sum of all is known.
  __device__ __forceinline__ void put_sum(int query_head) const {
    const bool is_own = query_head < c_.k.group;
    const int end = is_own ? c_.end_counted - place_ : 0;  // of first_page
    float* scores = c_.own_scores(query_head) + place_;
    float most = kLeast, sum = 0.f;
#pragma unroll 1
    for (int turn = 0; c_.octets.first_page(turn) < end; ++turn) most = fmaxf(most, scores[kOctet * turn]);
    most = head_max(most);
#pragma unroll 1
    for (int turn = 0; c_.octets.first_page(turn) < end; ++turn) {
      const float weight = ptx::exp2_approx(scores[kOctet * turn] - most);
      scores[kOctet * turn] = weight;
      sum += weight;
    }
    sum = head_sum(sum);
    if (!is_own || place_ > 0) return;
    warp_sums(query_head)[c_.warp] = most + __log2f(sum);
    factors()[query_head] = most;
  }

  // The CTA's, to every CTA.
  __device__ __forceinline__ void send_sum(int query_head) const {
    const bool is_own = query_head < c_.k.group;
    const float all = together(warp_sums(is_own ? query_head : 0), c_.k.warps);
    if (is_own && place_ < c_.peers.count) c_.peers.send(cta_sums(query_head) + c_.peers.rank, all, place_);
  }

  __device__ __forceinline__ void put_factor(int query_head) const {
    const bool is_own = query_head < c_.k.group, is_alone = c_.peers.count == 1;
    const int known = is_own ? query_head : 0;
    const float all = together(is_alone ? warp_sums(known) : cta_sums(known), is_alone ? c_.k.warps : c_.peers.count);
    if (is_own && place_ == 0) factors()[query_head] = ptx::exp2_approx(factors()[query_head] - all);
  }

  // The logarithm of the sum of up to 2 kOctet sums, by the lanes of a head.
  __device__ __forceinline__ float together(const float* sums, int n) const {
    const float a = place_ < n ? sums[place_] : -INFINITY;
    const float b = place_ + kOctet < n ? sums[place_ + kOctet] : -INFINITY;
    const float most = head_max(fmaxf(fmaxf(a, b), kLeast));
    return most + __log2f(head_sum(ptx::exp2_approx(a - most) + ptx::exp2_approx(b - most)));
  }
  static_assert(kMaxWarps <= 2 * kOctet && kMaxCluster <= kOctet, "together() and send_sum() take them at once");

  __device__ __forceinline__ float agreed(int own_place) const {
    const float* scores = c_.own_scores(0) + own_place;
    const int stride = c_.k.row_stride();
    float all = c_.p.combine == Combine::kMax ? -INFINITY : 0.f;
#pragma unroll 1
    for (int h = 0; h < c_.k.group; ++h) {
      const float score = scores[h * stride];
      if (c_.p.combine == Combine::kMax) all = fmaxf(all, score);
      else all += c_.p.combine == Combine::kSum ? score : score * factors()[h];
    }
    return all;
  }

  __device__ __forceinline__ float* warp_sums(int query_head) const {
    return c_.shared.sums + query_head * TilesShared::kSumStride;
  }
  __device__ __forceinline__ float* cta_sums(int query_head) const { return warp_sums(query_head) + kMaxWarps; }
  __device__ __forceinline__ float* factors() const { return c_.shared.factors + c_.warp * c_.k.group; }

  const TilesContext& c_;
  const int head_, place_;
};

}  // namespace bicl::sparse
