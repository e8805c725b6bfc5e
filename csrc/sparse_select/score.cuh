// Scores of pages: for each query head the log-sum-exp of its scores of the page's centroids, each counted as often as
// it stands for a key, and raised by what keys around it add to the mean of an exponential: half the query's squared
// length times their spread. The index is read once; its bytes are the floor.
#pragma once

#include "hadamard.cuh"
#include "rows.cuh"
#include "tiles_cta.cuh"

namespace bicl::sparse {

// A warp's octets, one after the other; page_at(octet, place): where its page `place` stands in the sequence, -1: there is
// none. kPlain: a group of at most four query heads, and rows of at most 128 elements.
template <bool kPlain, typename Context, typename PageAt>
class Scorer {
  using Shape = typename Context::Shape;
  static constexpr int kCentroids = Shape::kCentroids, kDepth = Shape::kDepth;

 public:
  __device__ __forceinline__ Scorer(const Context& c, int octets, const PageAt& page_at)
      : c_(c), octets_(octets), page_at_(page_at), rows_(c) {}

  // All warps call begin(), then prepare(); score() is of what was loaded last. All that needs no query is done ahead of
  // it: a warp alone takes long for few instructions.
  __device__ __forceinline__ void begin() {
    const auto* weights = reinterpret_cast<const float4*>(c_.p.weights) + 2 * c_.lane;
    if (c_.lane * 8 < c_.p.head_dim) weights_[0] = __ldg(weights), weights_[1] = __ldg(weights + 1);
    entries_ = {entry_at(0), entry_at(kEntryOctets), 0};
    ask(0);
    rows_.template wait<0>();
    take(0);
  }
  // The queries, which the kernel ahead makes, for all to multiply with. Further rows stay behind them: memory that is
  // busy with those answers after microseconds.
  __device__ __forceinline__ void prepare() const {
    if (c_.p.pdl) ptx::grid_dependency_wait();
    put_queries();
    __syncthreads();
#pragma unroll 1
    for (int octet = 1; octet < kDepth; ++octet) ask(octet);
  }
  // put(query head, place, score in bits) by all lanes.
  template <typename Put>
  __device__ __forceinline__ void score(int octet, const Put& put) {
#pragma unroll 1
    for (int block = 0; block < blocks(); ++block) {
      int acc[kCentroids / 2][4] = {};
#pragma unroll 1
      for (int step = 0; step < steps(); ++step) {
        if (steps() > 1) rows_.load(pieces_, octet, step);
        multiply(acc, pieces_, c_.shared.vectors + (block * steps() + step) * 64, c_.lane);
      }
      const int query_head = block * 4 + c_.lane % 4;
      put(query_head, c_.lane / 4, score_of(acc, query_head));
    }
  }
  // When an octet has been scored, on to the next.
  __device__ __forceinline__ void move_on(int octet) {
    if (octet + 1 == entries_.first + kEntryOctets)
      entries_ = {entries_.next, entry_at(octet + 1 + kEntryOctets), octet + 1};
    __syncwarp();  // all lanes have read its stage
    ask(octet + kDepth);
    rows_.template wait<kDepth - 1>();
    take(octet + 1);
  }

 private:
  static constexpr int kEntryOctets = 32 / kOctet;  // whose entries a warp reads at once
  static_assert(kDepth <= kEntryOctets, "ids are known that far ahead");

  __device__ __forceinline__ int blocks() const { return kPlain ? 1 : c_.k.blocks; }
  __device__ __forceinline__ int steps() const { return kPlain ? 1 : c_.k.steps; }

  // Of the page table: of the kEntryOctets octets that are under way and of those behind them; -1 where there is nothing to
  // score.
  struct Entries {
    int32_t now, next;
    int first;  // of those under way
  };

  // The lane's of kEntryOctets octets.
  __device__ __forceinline__ int32_t entry_at(int first) const {
    const int octet = first + c_.lane / kOctet;
    const int page = octet < octets_ ? page_at_(octet, c_.lane % kOctet) : -1;
    return page < 0 ? -1 : c_.table()[page];
  }
  // Of page `place` of an octet: one under way, or up to kEntryOctets behind.
  __device__ __forceinline__ int32_t id_of(int octet, int place) const {
    const int32_t own = octet < entries_.first + kEntryOctets ? entries_.now : entries_.next;
    return __shfl_sync(~0u, own, octet % kEntryOctets * kOctet + place);
  }
  __device__ __forceinline__ void ask(int octet) const {
    rows_.ask(octet, [&](int place) { return id_of(octet, place); });
  }
  // From the ring to the lanes; longer rows are read a step at a time.
  __device__ __forceinline__ void take(int octet) {
    if (steps() == 1) rows_.load(pieces_, octet, 0);
    rows_.load(facts_, octet);
  }

  // Of the lane's page and query head: log-sum-exp over the page's centroids, in bits.
  __device__ __forceinline__ float score_of(const int (&acc)[kCentroids / 2][4], int query_head) const {
    const float4 query = c_.shared.scales[query_head];
    const auto* affine = reinterpret_cast<const __half2*>(facts_.affine);
    float values[kCentroids], most = kLeast, sum = 0.f;
#pragma unroll
    for (int c = 0; c < kCentroids; ++c) {
      const int* product = acc[c / 2] + c % 2 * 2;
      const float2 ab = __half22float2(affine[c]);
      // An e5m2 is the upper byte of a half.
      const uint32_t spread = c % 2 ? facts_.facts[c / 2] >> 16 & 0xff00 : facts_.facts[c / 2] & 0xff00;
      values[c] = fmaf(query.x * ab.x, static_cast<float>(kQueryStep * product[0] + product[1]),
                       fmaf(query.y, ab.y, query.z * __half2float(__ushort_as_half(static_cast<uint16_t>(spread)))));
      most = fmaxf(most, values[c]);
    }
#pragma unroll
    for (int c = 0; c < kCentroids; ++c) {
      const uint32_t keys = facts_.facts[c / 2] >> c % 2 * 16 & 0xff;
      sum = fmaf(static_cast<float>(keys), ptx::exp2_approx(values[c] - most), sum);
    }
    return most + __log2f(sum);
  }

  // The queries of the group, weighted and turned, as integers of 15 bits in two columns, for multiply(). A warp a head,
  // a lane the eight elements of a word.
  __device__ __forceinline__ void put_queries() const {
    const int words = c_.p.index.row_bytes / 4, warps = Shape::kThreads / 32;
#pragma unroll 1
    for (int query_head = c_.warp; query_head < c_.k.group; query_head += warps) {
      float values[8] = {};
      if (c_.lane * 8 < c_.p.head_dim) {
        const uint4 raw = *reinterpret_cast<const uint4*>(
            static_cast<const uint16_t*>(c_.p.query) + c_.sequence * c_.p.query_token_stride +
            static_cast<int64_t>(c_.head * c_.k.group + query_head) * c_.p.query_head_stride + c_.lane * 8);
        const float each[8] = {weights_[0].x, weights_[0].y, weights_[0].z, weights_[0].w,
                               weights_[1].x, weights_[1].y, weights_[1].z, weights_[1].w};
#pragma unroll
        for (int i = 0; i < 8; ++i)
          values[i] = each[i] * (c_.p.query_dtype == DType::kBFloat16
                                     ? to_float(reinterpret_cast<const __nv_bfloat16*>(&raw)[i])
                                     : to_float(reinterpret_cast<const __half*>(&raw)[i]));
      }
      float most = 0.f, squares = 0.f;
#pragma unroll
      for (int i = 0; i < 8; ++i) squares = fmaf(values[i], values[i], squares);
      turn_eighths(values, c_.p.head_dim, c_.lane);
#pragma unroll
      for (int i = 0; i < 8; ++i) most = fmaxf(most, fabsf(values[i]));
      most = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(most)));  // not negative: ordered as their bits
      squares = lanes_sum(squares, 1, 16);
      const float step = most / kQueryMost, inverse = most > 0.f ? kQueryMost / most : 0.f;
      uint32_t columns[2][2] = {};
      int sum = 0;
      const auto put = [&](int half, int i, int whole) {
        const int first = (whole + kQueryStep / 2) >> 7;
        columns[0][half] |= static_cast<uint32_t>(first & 0xff) << 8 * i;
        columns[1][half] |= static_cast<uint32_t>((whole - kQueryStep * first) & 0xff) << 8 * i;
      };
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int low = __float2int_rn(values[i] * inverse), high = __float2int_rn(values[i + 4] * inverse);
        sum += low + high;
        put(0, i, 16 * low - high);
        put(1, i, high);
      }
      sum = __reduce_add_sync(~0u, sum);
      // Word lane % 4 of piece lane / 4, which is thread t's of the step.
      if (c_.lane < words) {
        auto* pairs = reinterpret_cast<uint2*>(c_.shared.vectors + (query_head / 4 * steps() + c_.lane / 16) * 64);
        uint2* at = pairs + (c_.lane % 4 / 2 * 32 + query_head % 4 * 8 + c_.lane / 4 % 4) * 2 + c_.lane % 2;
        at[0] = make_uint2(columns[0][0], columns[0][1]);
        at[4 * 2] = make_uint2(columns[1][0], columns[1][1]);
      }
      const float bits = c_.p.scale * kLog2e;
      const float scale = bits * step * rsqrtf(static_cast<float>(turn_block(c_.p.head_dim)));
      if (c_.lane == 0)
        c_.shared.scales[query_head] = make_float4(scale / 16, scale * static_cast<float>(sum),
                                                   bits * c_.p.scale / 2 * squares, 0.f);
    }
  }

  const Context& c_;
  const int octets_;
  const PageAt& page_at_;
  const RowRing<Context> rows_;
  Entries entries_;
  float4 weights_[2];
  // Of the octet that was taken last, and of page lane / 4.
  PagePieces<kCentroids> pieces_;
  RowFacts<kCentroids> facts_;
};

}  // namespace bicl::sparse
