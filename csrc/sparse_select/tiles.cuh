// Which pages a decode step reads: scores of all pages of a (sequence, KV head) against its queries, and the best.
//
//   score    a query head's score of a page: what it would weigh if its keys filled the box of its index row,
//            scale * sum_d (a_d q_d centre_d + w_d |q_d| half_d), which is one product of the row (minima, maxima)
//            with coefficients of the query
//   combine  the heads of a group agree on one score a page
//   select   first and recent pages, and the best of the rest, ascending in position
//
// Choosing does all three in one launch: the CTAs of a cluster score a share of the pages each and send what they
// agreed on to the first, which selects. The index is read once; its bytes are the floor. Everything is read on the
// device: a captured launch is right for any lengths.
#pragma once

#include "../common/fast_div.h"
#include "dot.cuh"
#include "peers.cuh"
#include "topk.cuh"

namespace bicl::sparse {

constexpr int kAlonePages = kWarps * kRows;  // scored by one CTA at once
constexpr float kLog2e = 1.4426950408889634f;

enum class Work { kScore, kSelect, kChoose };

struct TilesKernelParams {
  TilesParams p;
  FastDiv heads;   // KV heads
  FastDiv splits;  // CTAs a (sequence, KV head)
  int group;       // query heads of one KV head
  int turns;       // blocks of 8 kBlocks query heads
  int steps;       // of 4 pieces, in an index row
  int row_stride;  // of a head's scores in shared memory
  int page_log2;   // of tokens a page
};

// Shared memory beside TopKScratch.
struct TilesShared {
  uint4* vectors;  // [turns * blocks][steps][lane], the coefficients
  float* weights;  // [2][dims]
  float2* stats;   // [cluster][group]: greatest score and sum of a CTA's share
  float* factors;  // [group]
  float* scores;   // [group][row_stride] of the CTA's share
  int32_t* pages;  // [max_pages], the sequence's page table
  uint32_t* keys;  // [max_pages]
  uint16_t* list;  // [max_pages]

  __host__ __device__ static int vector_count(const TilesKernelParams& k, int blocks, Work work) {
    return work == Work::kSelect ? 0 : k.turns * blocks * k.steps * 32;
  }
  static int bytes(const TilesKernelParams& k, int blocks, Work work) {
    int bytes = vector_count(k, blocks, work) * 16 + 2 * k.p.index.dims * 4;
    if (work != Work::kScore)
      bytes += k.group * (kMaxCluster * 8 + 4 + k.row_stride * 4) + k.p.max_pages * 10;
    return bytes;
  }
  __device__ __forceinline__ TilesShared(char* base, const TilesKernelParams& k, int blocks, Work work) {
    vectors = reinterpret_cast<uint4*>(base);
    stats = reinterpret_cast<float2*>(vectors + vector_count(k, blocks, work));
    weights = reinterpret_cast<float*>(stats + (work == Work::kScore ? 0 : kMaxCluster * k.group));
    factors = weights + 2 * k.p.index.dims;
    scores = factors + k.group;
    pages = reinterpret_cast<int32_t*>(scores + k.group * k.row_stride);
    keys = reinterpret_cast<uint32_t*>(pages + k.p.max_pages);
    list = reinterpret_cast<uint16_t*>(keys + k.p.max_pages);
  }
};

template <typename T, int kBlocks, Work kWork>
class TilesCta {
 public:
  __device__ __forceinline__ TilesCta(const TilesKernelParams& k, char* shared)
      : k_(k), p_(k.p), warp_(threadIdx.x / 32), lane_(threadIdx.x % 32), shared_(shared, k, kBlocks, kWork) {
    uint32_t head, rank;
    const uint32_t pair = k.splits.divide(blockIdx.x, rank);
    sequence_ = k.heads.divide(pair, head);
    head_ = head;
    peers_ = {static_cast<int>(k.splits.divisor), static_cast<int>(rank)};
  }

  __device__ __forceinline__ void run(TopKScratch& scratch) {
    if (p_.pdl && kWork != Work::kChoose) ptx::grid_launch_dependents();
    if (p_.pdl && (p_.late_input || kWork == Work::kSelect)) ptx::grid_dependency_wait();
    if (kWork == Work::kChoose) peers_.arrive_started();
    read_lengths();
    if (kWork != Work::kScore && keep_ == count_) {
      if (kWork == Work::kChoose) peers_.wait_started();
      keep_all();
      return;
    }
    if (kWork == Work::kChoose && peers_.count > 1 && count_ <= kAlonePages) {
      // Little to share: quicker alone than with barriers.
      peers_.wait_started();
      if (peers_.rank > 0) return;
      peers_ = {1, 0};
      begin_ = 0, end_ = count_;
    }
    if (kWork == Work::kSelect) read_scores();
    else score();
    if (kWork == Work::kScore) return;
    if (kWork == Work::kChoose) peers_.wait_started();
    if (p_.combine == Combine::kSoftmax) normalise();
    combine();
    peers_.join();
    if (peers_.rank > 0) return;
    // Not sooner: the CTAs of attention that came early would sit where few of them fit, and stay there.
    if (p_.pdl && kWork == Work::kChoose) ptx::grid_launch_dependents();
    select(scratch);
  }

 private:
  // --- lengths -----------------------------------------------------------------------------------------------------
  __device__ __forceinline__ void read_lengths() {
    length_ = max(p_.sequences.cache_seqlens[sequence_], 0);
    count_ = min((length_ + p_.page_size - 1) >> k_.page_log2, p_.max_pages);
    first_scored_ = min(p_.rule.first, count_);
    end_scored_ = max(first_scored_, count_ - p_.rule.recent);
    const int groups = (count_ + kRows - 1) / kRows;
    begin_ = k_.splits.divide(groups * peers_.rank) * kRows;
    end_ = min(static_cast<int>(k_.splits.divide(groups * (peers_.rank + 1))) * kRows, count_);
    if (kWork == Work::kScore) return;
    const float share = p_.sparsity[sequence_];
    // tiles_to_keep(): each operation rounded, as there.
    const int skipped = static_cast<int>(floorf(__fadd_rn(__fmul_rn(static_cast<float>(count_), share), 1.f / 64)));
    const int kept = min(max(count_ - skipped, max(p_.rule.floor, p_.rule.first + p_.rule.recent)), p_.rule.max_k);
    keep_ = share > 0.f ? min(kept, count_) : count_;
  }

  __device__ __forceinline__ const int32_t* table() const {
    return p_.sequences.page_table + sequence_ * p_.sequences.page_table_stride;
  }
  // Row of the selection, and first row of the group's scores.
  __device__ __forceinline__ int64_t row() const {
    return (static_cast<int64_t>(sequence_) * p_.num_kv_heads + head_) * p_.max_pages;
  }
  __device__ __forceinline__ float* scores_of(int query_head) const {
    return p_.scores + row() * k_.group + static_cast<int64_t>(query_head) * p_.max_pages;
  }

  // --- scores ------------------------------------------------------------------------------------------------------
  // Rows g and g + 8 of the 16 pages from `first` on; null where there is nothing to score.
  struct Sources {
    const uint16_t *upper, *lower;
  };
  __device__ __forceinline__ int32_t page_at(int first) const {
    const int position = first + lane_ % kRows;
    return position >= begin_scored() && position < end_scored() ? table()[position] : -1;
  }
  __device__ __forceinline__ Sources sources(int32_t page) const {
    const int64_t row = 2 * p_.index.dims;
    const auto* base = static_cast<const uint16_t*>(p_.index.vectors) + head_ * row;
    const auto at = [&](int32_t id) { return id < 0 ? nullptr : base + id * (p_.num_kv_heads * row); };
    return {at(__shfl_sync(~0u, page, lane_ / 4)), at(__shfl_sync(~0u, page, lane_ / 4 + 8))};
  }

  __device__ __forceinline__ void score() {
    const int pieces = 2 * p_.index.dims / kPieceElements;
    int first = begin_ + warp_ * kRows;
    int32_t page = page_at(first);
    bool ready = false;
#pragma unroll 1
    do {
      const Sources from = sources(page);
      page = page_at(first + kWarps * kRows);
#pragma unroll 1
      for (int turn = 0; turn < k_.turns; ++turn) {
        float acc[kBlocks][4] = {};
#pragma unroll 1
        for (int step = 0; step < k_.steps; step += kStep) {
          RowPieces rows;
          load_rows(rows, from.upper, from.lower, 4 * step, pieces, lane_);
          if (!ready) prepare();  // the first rows are on their way while the query is still being written
          ready = true;
          multiply<T, kBlocks>(acc, rows, shared_.vectors + (turn * kBlocks * k_.steps + step) * 32, k_.steps * 32,
                               k_.steps - step, lane_);
        }
        put_scores(acc, turn * kBlocks * 8, first);
      }
      first += kWarps * kRows;
    } while (first < end_);
    __syncthreads();
  }

  __device__ __forceinline__ void prepare() const {
    if (kWork == Work::kChoose && peers_.rank == 0) fetch_table();
#pragma unroll 1
    for (int i = threadIdx.x; i < 2 * p_.index.dims; i += kThreads) shared_.weights[i] = p_.weights[i];
    __syncthreads();
    if (p_.pdl) ptx::grid_dependency_wait();
    put_coefficients();
    __syncthreads();
  }

  __device__ __forceinline__ void fetch_table() const {
#pragma unroll 2
    for (int i = threadIdx.x; i < count_; i += kThreads) shared_.pages[i] = table()[i];
  }

  __device__ __forceinline__ void put_scores(const float (&acc)[kBlocks][4], int first_head, int first) const {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int query_head = first_head + 8 * n + lane_ % 4 * 2 + i % 2;
        const int position = first + lane_ / 4 + i / 2 * 8;
        if (query_head >= k_.group || position >= end_) continue;
        if (kWork == Work::kScore) scores_of(query_head)[position] = acc[n][i];
        else shared_.scores[query_head * k_.row_stride + position - begin_] = acc[n][i];
      }
  }

  __device__ __forceinline__ void read_scores() const {
#pragma unroll 1
    for (int query_head = 0; query_head < k_.group; ++query_head)
#pragma unroll 2
      for (int i = threadIdx.x; i < count_; i += kThreads)
        shared_.scores[query_head * k_.row_stride + i] = scores_of(query_head)[i];
    fetch_table();
    __syncthreads();
  }

  // The queries of the group as vectors for multiply(): of each dim, scale (a q - w |q|) / 2 for the minimum and
  // scale (a q + w |q|) / 2 for the maximum.
  __device__ __forceinline__ void put_coefficients() const {
    const auto* query = static_cast<const T*>(p_.query) + sequence_ * p_.query_token_stride;
    const int dims = p_.index.dims, half = dims / kPieceElements;
    const int total = k_.turns * kBlocks * k_.steps;
#pragma unroll 1
    for (int item = warp_, block = 0, step = warp_; item < total; item += kWarps, step += kWarps) {
      while (step >= k_.steps) step -= k_.steps, ++block;
      const int query_head = block * 8 + lane_ / 4;
      int piece = 4 * step + lane_ % 4;
      const float sign = piece < half ? -0.5f : 0.5f;
      if (piece >= half) piece -= half;
      alignas(16) T values[kPieceElements] = {};
      if (query_head < k_.group && piece < half) {
        const int dim = piece * kPieceElements;
        const uint4 raw = *reinterpret_cast<const uint4*>(
            query + static_cast<int64_t>(head_ * k_.group + query_head) * p_.query_head_stride + dim);
#pragma unroll
        for (int j = 0; j < kPieceElements; ++j) {
          const float q = to_float(reinterpret_cast<const T*>(&raw)[j]);
          const float centre = shared_.weights[dim + j] * q, spread = shared_.weights[dims + dim + j] * fabsf(q);
          values[j] = from_float<T>(p_.scale * (0.5f * centre + sign * spread));
        }
      }
      shared_.vectors[item * 32 + lane_] = *reinterpret_cast<const uint4*>(values);
    }
  }

  // --- combining -----------------------------------------------------------------------------------------------------
  // Pages of this CTA's share that compete.
  __device__ __forceinline__ int begin_scored() const { return max(begin_, first_scored_); }
  __device__ __forceinline__ int end_scored() const { return min(end_, end_scored_); }

  // Each head's scores to exp(score - greatest of the share), and the factor that makes them its softmax over all
  // pages that compete. A warp a head.
  __device__ __forceinline__ void normalise() const {
#pragma unroll 1
    for (int query_head = warp_; query_head < k_.group; query_head += kWarps) {
      float* scores = shared_.scores + query_head * k_.row_stride - begin_;
      float most = -INFINITY, sum = 0.f;
#pragma unroll 4
      for (int i = begin_scored() + lane_; i < end_scored(); i += 32) most = fmaxf(most, scores[i]);
      most = warp_max(most);
#pragma unroll 4
      for (int i = begin_scored() + lane_; i < end_scored(); i += 32) {
        const float weight = ptx::exp2_approx((scores[i] - most) * kLog2e);
        scores[i] = weight;
        sum += weight;
      }
      sum = warp_sum(sum);
      if (lane_ < peers_.count) peers_.send(&shared_.stats[peers_.rank * k_.group + query_head], most, sum, lane_);
    }
    peers_.exchange();
#pragma unroll 1
    for (int query_head = warp_; query_head < k_.group; query_head += kWarps) {
      const float2 part =
          lane_ < peers_.count ? shared_.stats[lane_ * k_.group + query_head] : make_float2(-INFINITY, 0.f);
      const float most = warp_max(part.x);
      const float all = warp_sum(part.x == -INFINITY ? 0.f : part.y * ptx::exp2_approx((part.x - most) * kLog2e));
      const float own = __shfl_sync(~0u, part.x, peers_.rank);
      if (lane_ == 0) shared_.factors[query_head] = __fdividef(ptx::exp2_approx((own - most) * kLog2e), all);
    }
    __syncthreads();
  }

  // One key a page, to the first CTA.
  __device__ __forceinline__ void combine() const {
    const float* scores = shared_.scores - begin_;
    const int stride = k_.row_stride;
#pragma unroll 1
    for (int i = begin_ + threadIdx.x; i < end_; i += kThreads) {
      uint32_t key = kAlways;
      if (i >= first_scored_ && i < end_scored_) {
        float all = p_.combine == Combine::kMax ? -INFINITY : 0.f;
#pragma unroll 4
        for (int h = 0; h < k_.group; ++h) {
          const float score = scores[h * stride + i];
          if (p_.combine == Combine::kMax) all = fmaxf(all, score);
          else all += p_.combine == Combine::kSum ? score : score * shared_.factors[h];
        }
        key = key_of(all);
      }
      peers_.send(shared_.keys + i, key, 0);
    }
  }

  // --- selection -----------------------------------------------------------------------------------------------------
  __device__ __forceinline__ void keep_all() const {
    if (p_.pdl) ptx::grid_dependency_wait();  // the kernels ahead may still read what this one writes
#pragma unroll 1
    for (int i = begin_ + threadIdx.x; i < end_; i += kThreads) put(i, i, table()[i]);
    put_length();
  }

  __device__ __forceinline__ void select(TopKScratch& scratch) const {
    const int need = keep_ - (count_ - (end_scored_ - first_scored_));
    const Cut cut = need > 0 ? find_cut(shared_.keys, first_scored_, end_scored_, need, scratch) : Cut{kAlways - 1, 0};
    list_taken(shared_.keys, count_, cut, shared_.list, scratch);
#pragma unroll 2
    for (int i = threadIdx.x; i < keep_; i += kThreads) {
      const int position = shared_.list[i];
      put(i, position, shared_.pages[position]);
    }
    put_length();
  }

  __device__ __forceinline__ void put(int index, int position, int32_t page) const {
    p_.selected[row() + index] = page;
    if (p_.positions != nullptr) p_.positions[row() + index] = position;
  }

  // Every head of a sequence keeps as many pages, the last one always.
  __device__ __forceinline__ void put_length() const {
    if (head_ == 0 && peers_.rank == 0 && threadIdx.x == 0)
      p_.selected_seqlens[sequence_] = length_ - (count_ - keep_) * p_.page_size;
  }

  const TilesKernelParams& k_;
  const TilesParams& p_;
  const int warp_, lane_;
  const TilesShared shared_;
  int sequence_, head_;
  Peers peers_;
  int length_ = 0, count_ = 0;             // tokens and pages of the sequence
  int first_scored_ = 0, end_scored_ = 0;  // pages that compete
  int begin_ = 0, end_ = 0;                // pages of this CTA's share
  int keep_ = 0;
};

template <typename T, int kBlocks, Work kWork>
__global__ void __launch_bounds__(kThreads, 2) tiles_kernel(const __grid_constant__ TilesKernelParams params) {
  extern __shared__ __align__(16) char shared[];
  __shared__ TopKScratch scratch;
  TilesCta<T, kBlocks, kWork>(params, shared).run(scratch);
}

}  // namespace bicl::sparse
