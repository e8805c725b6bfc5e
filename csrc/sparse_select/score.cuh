// Scores of pages: for each query head the log-sum-exp of its scores of the page's centroids, each counted as often as
// it stands for a key, and raised by what keys around it add to the mean of an exponential: half the query's squared
// length times their spread. The index is read once; its bytes are the floor.
#pragma once

#include "hadamard.cuh"
#include "rows.cuh"
#include "tiles_cta.cuh"

namespace bicl::sparse {

// Of all but the rows of centroids 2 t and 2 t + 1 of a page, t = lane % 4; the last lanes have none where there are few.
struct Remainder {
  uint2 affine;     // a and b of each
  uint32_t facts;   // keys of each, and their spread
};

// A warp's octets, one after the other; page_at(octet, place): where its page `place` stands in the sequence, -1: there is
// none. kPlain: a group of at most four query heads, and rows of at most 128 elements.
template <int kCentroids, bool kPlain, typename Context, typename PageAt>
class Scorer {
 public:
  // before: octets that the warp's ring has seen.
  __device__ __forceinline__ Scorer(const Context& c, int octets, const PageAt& page_at, int before = 0)
      : c_(c), octets_(octets), before_(before), page_at_(page_at), rows_(c) {}

  // Once, before anything is scored; prepare() has everybody see it.
  static __device__ __forceinline__ void start(const Context& c) { RowRing<kCentroids, Context>(c).start(); }

  // All warps call begin() and load(0), then prepare(); score() is of what was loaded last. All that needs no query is done
  // ahead of it: a warp alone takes long for few instructions.
  __device__ __forceinline__ void begin() {
    const auto* weights = reinterpret_cast<const float4*>(c_.p.weights) + 2 * c_.lane;
    if (c_.lane * 8 < c_.p.head_dim) weights_[0] = __ldg(weights), weights_[1] = __ldg(weights + 1);
    entries_ = {entry_at(0), entry_at(kEntryOctets), 0};
    // Further rows stay behind the queries: memory that is busy with them answers after microseconds.
    if (rows_.ahead() > 0) ask(0);
    next_ = load_part(0);
  }
  __device__ __forceinline__ void load(int octet) {
    if (octet >= octets_) return;
    if (octet == entries_.first + kEntryOctets) entries_ = {entries_.next, entry_at(octet + kEntryOctets), octet};
    const Part part = next_;
    next_ = load_part(octet + 1);
    record_ = part.record;
    facts_ = {part.remainder.affine,
              halves_of(__log2f(static_cast<float>(part.remainder.facts & 0xff)),
                        __log2f(static_cast<float>(part.remainder.facts >> 16 & 0xff))),
              part.remainder.facts & 0xff00ff00u};  // an e5m2 is the upper byte of a half
    rows_.wait(before_ + octet);
    if (steps() == 1) rows_.load(pieces_, before_ + octet, 0, record_);
  }
  // Asks for the rows to come, when an octet has been scored.
  __device__ __forceinline__ void refill(int octet) const {
#pragma unroll 1
    for (int next = octet == 0 ? 1 : octet + rows_.ahead(); next <= octet + rows_.ahead(); ++next) ask(next);
  }
  // The queries, which the kernel ahead makes, for all to multiply with.
  __device__ __forceinline__ void prepare() {
    if (c_.p.pdl) ptx::grid_dependency_wait();
    put_queries();
    c_.sync();
  }
  // put(query head, place, page or -1, score in bits) by all lanes.
  template <typename Put>
  __device__ __forceinline__ void score(int octet, const Put& put) {
#pragma unroll 1
    for (int block = 0; block < blocks(); ++block) {
      int acc[kCentroids / 2][4] = {};
#pragma unroll 1
      for (int step = 0; step < steps(); ++step) {
        if (steps() > 1) rows_.load(pieces_, before_ + octet, step, record_);
        multiply(acc, pieces_, c_.shared.vectors + (block * steps() + step) * 64, c_.lane);
      }
      const int query_head = block * 4 + c_.lane % 4, place = c_.lane / 4;
      put(query_head, place, page_at_(octet, place), score_of(acc, query_head));
    }
  }

 private:
  static constexpr int kEntryOctets = 32 / kOctet;  // whose entries a warp reads at once

  __device__ __forceinline__ int blocks() const { return kPlain ? 1 : c_.k.blocks; }
  __device__ __forceinline__ int steps() const {
    return kPlain || Context::Shape::kOneStep ? 1 : c_.k.steps;
  }

  // Of the page table: of the kEntryOctets octets that are under way and of those behind them; -1 where there is nothing to
  // score.
  struct Entries {
    int32_t now, next;
    int first;  // of those under way
  };

  // What belongs to page lane / 4 of an octet, but for its rows.
  struct Part {
    const uint8_t* record;  // null: nothing to score
    Remainder remainder;
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
    if (octet >= octets_) return;
    const int32_t id = id_of(octet, c_.lane % kOctet);
    rows_.ask(before_ + octet, id);
    // The rest follows an octet ahead, which is less than memory takes.
    if (c_.lane < 2 * kOctet && id >= 0)
      ptx::prefetch(c_.lane < kOctet ? affine_of(record_of(id)) : facts_of(record_of(id)));
  }
  __device__ __forceinline__ Part load_part(int octet) const {
    const int32_t id = id_of(octet, c_.lane / 4);
    const uint8_t* record = id < 0 ? nullptr : record_of(id);
    return {record, load_remainder(record)};
  }

  // A page's part of the index, and where what belongs to its rows begins there, of this KV head.
  __device__ __forceinline__ const uint8_t* record_of(int32_t id) const {
    return c_.p.index.records + id * c_.p.index.record_bytes;
  }
  __device__ __forceinline__ const uint8_t* affine_of(const uint8_t* record) const {
    return record + c_.p.num_kv_heads * kCentroids * c_.p.index.row_bytes + c_.head * kCentroids * 4;
  }
  __device__ __forceinline__ const uint8_t* facts_of(const uint8_t* record) const {
    return record + c_.p.num_kv_heads * kCentroids * (c_.p.index.row_bytes + 4) + c_.head * kCentroids * 2;
  }

  __device__ __forceinline__ Remainder load_remainder(const uint8_t* record) const {
    const int own = c_.lane % 4 * 2;
    if (record == nullptr || own >= kCentroids) return {};
    return {__ldg(reinterpret_cast<const uint2*>(affine_of(record) + own * 4)),
            __ldg(reinterpret_cast<const uint32_t*>(facts_of(record) + own * 2))};
  }

  static __device__ __forceinline__ float2 halves(uint32_t pair) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  }

  static __device__ __forceinline__ uint32_t halves_of(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }

  // Of the lane's page and query head: log-sum-exp over the page's centroids, in bits.
  __device__ __forceinline__ float score_of(const int (&acc)[kCentroids / 2][4], int query_head) const {
    const float4 query = c_.shared.scales[query_head];
    float values[kCentroids], most = kLeast, sum = 0.f;
#pragma unroll
    for (int pair = 0; pair < kCentroids / 2; ++pair) {
      const int from = c_.lane / 4 * 4 + pair;
      const float2 first = halves(__shfl_sync(~0u, facts_.affine.x, from));
      const float2 second = halves(__shfl_sync(~0u, facts_.affine.y, from));
      const float2 size = halves(__shfl_sync(~0u, facts_.sizes, from));
      const float2 spread = halves(__shfl_sync(~0u, facts_.spreads, from));
      const int (&product)[4] = acc[pair];
      values[2 * pair] = fmaf(query.x * first.x, static_cast<float>(kQueryStep * product[0] + product[1]),
                              fmaf(query.y, first.y, fmaf(query.z, spread.x, size.x)));
      values[2 * pair + 1] = fmaf(query.x * second.x, static_cast<float>(kQueryStep * product[2] + product[3]),
                                  fmaf(query.y, second.y, fmaf(query.z, spread.y, size.y)));
      most = fmaxf(most, fmaxf(values[2 * pair], values[2 * pair + 1]));
    }
#pragma unroll
    for (int c = 0; c < kCentroids; ++c) sum += ptx::exp2_approx(values[c] - most);
    return most + __log2f(sum);
  }

  // The queries of the group, weighted and turned, as integers of 15 bits in two columns, for multiply(). A warp a head,
  // a lane the eight elements of a word.
  __device__ __forceinline__ void put_queries() const {
    const int words = c_.p.index.row_bytes / 4, warps = Context::Shape::kThreads / 32;
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
  const int octets_, before_;
  const PageAt& page_at_;
  const RowRing<kCentroids, Context> rows_;
  Entries entries_;
  Part next_;
  float4 weights_[2];
  // Of the octet that was loaded last: of the lane's pair of centroids, as in Remainder, but in halves.
  const uint8_t* record_;
  PagePieces<kCentroids> pieces_;
  struct {
    uint2 affine;
    uint32_t sizes, spreads;
  } facts_;
};

}  // namespace bicl::sparse
