// Scores of pages: for each query head the log-sum-exp of its scores of the page's centroids, each counted as often as
// it stands for a key, and raised by what keys around it add to the mean of an exponential: half the query's squared
// length times their spread. The index is read once; its bytes are the floor.
#pragma once

#include "agree.cuh"
#include "hadamard.cuh"
#include "rows.cuh"
#include "tiles_cta.cuh"

namespace bicl::sparse {

// Of all but the rows of centroids 2 t and 2 t + 1 of a page, t = lane % 4; the last lanes have none where there are few.
struct Remainder {
  uint2 affine;     // a and b of each
  uint32_t facts;   // keys of each, and their spread
};

// kPlain: a group of at most four query heads, and rows of at most 128 elements.
template <int kCentroids, Work kWork, bool kPlain>
class Scorer {
 public:
  __device__ __forceinline__ explicit Scorer(const TilesContext& c) : c_(c), rows_(c) {}

  // The page table's entries of the lane in the first turns, asked for before anything of the sequence is known.
  __device__ __forceinline__ int32_t first_entry() const {
    const int page = page_of(0);
    return page < c_.p.max_pages ? c_.table()[page] : 0;
  }

  // meanwhile(): called when the first rows have been asked for.
  template <typename Meanwhile>
  __device__ __forceinline__ void run(int32_t entry, const Meanwhile& meanwhile) const {
    rows_.start();
    fetch_weights();
    Entries entries = {page_of(0) < c_.end_counted ? entry : -1, entry_at(kTurns), 0};
    // The other rows stay behind the queries: memory that is busy with them answers after microseconds.
    if (rows_.ahead() > 0) ask(entries, 0);
    Part next = load_part(entries, 0);
    if (c_.p.pdl) ptx::grid_dependency_wait();
    fetch_queries();
#pragma unroll 1
    for (int turn = 1; turn < rows_.ahead(); ++turn) ask(entries, turn);
    prepare();
    meanwhile();
#pragma unroll 1
    for (int turn = 0; has(turn); ++turn) {
      if (turn == entries.first_turn + kTurns) entries = {entries.next, entry_at(turn + kTurns), turn};
      const Part part = next;
      next = load_part(entries, turn + 1);
      rows_.wait(turn);
      PagePieces<kCentroids> pieces;
      rows_.load(pieces, turn, 0, part.record);
      const bool is_loaded = steps() == 1;
      if (is_loaded) ask(entries, turn + rows_.ahead());
      score(pieces, part, turn);
      if (!is_loaded) ask(entries, turn + rows_.ahead());
    }
    __syncwarp();
  }

 private:
  static constexpr int kTurns = 32 / kOctet;  // whose entries a warp reads at once

  __device__ __forceinline__ int blocks() const { return kPlain ? 1 : c_.k.blocks; }
  __device__ __forceinline__ int steps() const { return kPlain ? 1 : c_.k.steps; }

  // Of the page table: of the kTurns turns that are under way and of those behind them; -1 where there is nothing to score.
  struct Entries {
    int32_t now, next;
    int first_turn;  // of those under way
  };

  // What belongs to page lane / 4 of an octet, but for its rows.
  struct Part {
    const uint8_t* record;  // null: nothing to score
    Remainder remainder;
  };

  __device__ __forceinline__ bool has(int turn) const { return c_.octets.first_page(turn) < c_.count; }

  // The lane's of kTurns turns.
  __device__ __forceinline__ int page_of(int turn) const {
    return c_.octets.first_page(turn + c_.lane / kOctet) + c_.lane % kOctet;
  }
  __device__ __forceinline__ int32_t entry_at(int turn) const {
    const int page = page_of(turn);
    return page < c_.end_counted ? c_.table()[page] : -1;
  }
  // Of page `place` of a turn: one under way, or up to kTurns behind.
  __device__ __forceinline__ int32_t id_of(const Entries& entries, int turn, int place) const {
    const int32_t own = turn < entries.first_turn + kTurns ? entries.now : entries.next;
    return __shfl_sync(~0u, own, turn % kTurns * kOctet + place);
  }
  __device__ __forceinline__ void ask(const Entries& entries, int turn) const {
    if (has(turn)) rows_.ask(turn, id_of(entries, turn, c_.lane % kOctet));
  }
  __device__ __forceinline__ Part load_part(const Entries& entries, int turn) const {
    const int32_t id = id_of(entries, turn, c_.lane / 4);
    const uint8_t* record = id < 0 ? nullptr : c_.p.index.records + id * c_.p.index.record_bytes;
    return {record, load_remainder(record)};
  }

  __device__ __forceinline__ void score(PagePieces<kCentroids>& pieces, const Part& part, int turn) const {
#pragma unroll 1
    for (int block = 0; block < blocks(); ++block) {
      int acc[kCentroids / 2][4] = {};
#pragma unroll 1
      for (int step = 0; step < steps(); ++step) {
        if (steps() > 1 && block + step > 0) rows_.load(pieces, turn, step, part.record);
        multiply(acc, pieces, c_.shared.vectors + (block * steps() + step) * 64, c_.lane);
      }
      put_scores(acc, part.remainder, block * 4, turn);
    }
  }

  __device__ __forceinline__ Remainder load_remainder(const uint8_t* record) const {
    const int rows = c_.p.num_kv_heads * kCentroids, own = c_.head * kCentroids + c_.lane % 4 * 2;
    if (record == nullptr || c_.lane % 4 * 2 >= kCentroids) return {};
    const uint8_t* affine = record + rows * c_.p.index.row_bytes;
    return {__ldg(reinterpret_cast<const uint2*>(affine + own * 4)),
            __ldg(reinterpret_cast<const uint32_t*>(affine + rows * 4 + own * 2))};
  }

  __device__ __forceinline__ void fetch_weights() const {
    if (threadIdx.x < c_.p.head_dim / 4)
      ptx::cp_async_16(ptx::smem_address(c_.shared.weights + threadIdx.x), c_.p.weights + 4 * threadIdx.x);
  }

  __device__ __forceinline__ void fetch_queries() const {
    const int chunks = c_.p.head_dim / 8;
#pragma unroll 1
    for (int query_head = c_.warp; query_head < c_.k.group; query_head += c_.k.warps)
      if (c_.lane < chunks)
        ptx::cp_async_16(ptx::smem_address(c_.shared.queries + query_head * chunks + c_.lane),
                         static_cast<const uint16_t*>(c_.p.query) + c_.sequence * c_.p.query_token_stride +
                             static_cast<int64_t>(c_.head * c_.k.group + query_head) * c_.p.query_head_stride +
                             c_.lane * 8);
    ptx::cp_async_commit();
  }

  __device__ __forceinline__ void prepare() const {
    ptx::cp_async_wait<0>();
    __syncthreads();
    put_queries();
    __syncthreads();
  }

  static __device__ __forceinline__ float2 halves(uint32_t pair) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  }

  // Of page g of the turn's octet: log-sum-exp over its centroids, in bits. Query head t of four.
  __device__ __forceinline__ void put_scores(const int (&acc)[kCentroids / 2][4], const Remainder& remainder,
                                             int first_head, int turn) const {
    const int query_head = first_head + c_.lane % 4, place = c_.lane / 4, page = c_.octets.first_page(turn) + place;
    const float4 query = c_.shared.scales[query_head];
    const __half2 sizes = __floats2half2_rn(__log2f(static_cast<float>(remainder.facts & 0xff)),
                                            __log2f(static_cast<float>(remainder.facts >> 16 & 0xff)));
    const uint32_t spreads = remainder.facts & 0xff00ff00u;  // an e5m2 is the upper byte of a half
    float values[kCentroids], most = kLeast, sum = 0.f;
#pragma unroll
    for (int pair = 0; pair < kCentroids / 2; ++pair) {
      const int from = c_.lane / 4 * 4 + pair;
      const float2 first = halves(__shfl_sync(~0u, remainder.affine.x, from));
      const float2 second = halves(__shfl_sync(~0u, remainder.affine.y, from));
      const float2 size = halves(__shfl_sync(~0u, *reinterpret_cast<const uint32_t*>(&sizes), from));
      const float2 spread = halves(__shfl_sync(~0u, spreads, from));
      const int (&product)[4] = acc[pair];
      values[2 * pair] = fmaf(query.x * first.x, static_cast<float>(kQueryStep * product[0] + product[1]),
                              fmaf(query.y, first.y, fmaf(query.z, spread.x, size.x)));
      values[2 * pair + 1] = fmaf(query.x * second.x, static_cast<float>(kQueryStep * product[2] + product[3]),
                                  fmaf(query.y, second.y, fmaf(query.z, spread.y, size.y)));
      most = fmaxf(most, fmaxf(values[2 * pair], values[2 * pair + 1]));
    }
#pragma unroll
    for (int c = 0; c < kCentroids; ++c) sum += ptx::exp2_approx(values[c] - most);
    if (query_head >= c_.k.group || page >= c_.count) return;
    const float score = most + __log2f(sum);
    if (kWork == Work::kScore) c_.scores_of(query_head)[page] = score / kLog2e;
    else c_.own_scores(query_head)[kOctet * turn + place] = score;
  }

  // The queries of the group, weighted and turned, as integers of 15 bits in two columns, for multiply(). A warp a head,
  // a lane the eight elements of a word.
  __device__ __forceinline__ void put_queries() const {
    const int words = c_.p.index.row_bytes / 4;
#pragma unroll 1
    for (int query_head = c_.warp; query_head < c_.k.group; query_head += c_.k.warps) {
      float values[8] = {};
      if (c_.lane * 8 < c_.p.head_dim) {
        const float4 weights[2] = {c_.shared.weights[c_.lane * 2], c_.shared.weights[c_.lane * 2 + 1]};
        const uint4 raw = c_.shared.queries[query_head * c_.p.head_dim / 8 + c_.lane];
        const float each[8] = {weights[0].x, weights[0].y, weights[0].z, weights[0].w,
                               weights[1].x, weights[1].y, weights[1].z, weights[1].w};
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
      most = warp_max(most);
      squares = warp_sum(squares);
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

  const TilesContext& c_;
  const RowRing<kCentroids> rows_;
};

}  // namespace bicl::sparse
