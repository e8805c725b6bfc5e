// Which pages a decode step reads: scores of all pages of a (sequence, KV head) against its queries, and the best.
//
//   score   every page's index row times the query heads of the group, folded into one score a page
//   select  first and recent pages, and the best of the rest, ascending in position
//   choose  both in one launch: the CTAs of a cluster score a share each and send it to the first, which selects
//
// Memory-bound: the index is read once. Everything is read on the device: a captured launch is right for any lengths.
#pragma once

#include "../common/fast_div.h"
#include "dot.cuh"
#include "topk.cuh"

namespace bicl::sparse {

enum class Work { kScore, kSelect, kChoose };

struct TilesKernelParams {
  TilesParams p;
  FastDiv heads;     // KV heads
  FastDiv splits;    // CTAs a (sequence, KV head)
  int group;         // query heads of one KV head
  int turns;         // blocks of 8 kBlocks query heads
  int steps;         // of 4 pieces, in an index row
};

// --- combining the scores of a group -----------------------------------------------------------------------------
__device__ __forceinline__ float fold(Combine combine, float a, float b) {
  return combine == Combine::kMax ? fmaxf(a, b) : a + b;
}
__device__ __forceinline__ float neutral(Combine combine) { return combine == Combine::kMax ? -INFINITY : 0.f; }

// --- the cluster's CTAs, where there are several -----------------------------------------------------------------
struct Peers {
  int count, rank;

  __device__ void arrive_started() const {
#if __CUDA_ARCH__ >= 900
    if (count == 1) return;
    __syncwarp();
    ptx::cluster_arrive_relaxed();
#endif
  }
  __device__ void wait_started() const {
#if __CUDA_ARCH__ >= 900
    if (count == 1) return;
    __syncwarp();
    ptx::cluster_wait();
#endif
  }
  // Into the first CTA's copy of `target`, visible there after join().
  __device__ void send(uint32_t* target, uint32_t value) const {
#if __CUDA_ARCH__ >= 900
    if (count > 1) {
      ptx::store_cluster(ptx::map_shared(ptx::smem_address(target), 0), value);
      return;
    }
#endif
    *target = value;
  }
  // The first CTA waits for the others, which may end.
  __device__ void join() const {
#if __CUDA_ARCH__ >= 900
    if (count > 1) {
      __syncwarp();
      ptx::cluster_arrive();
      if (rank == 0) ptx::cluster_wait();
      return;
    }
#endif
    __syncthreads();
  }
};

// Shared memory of a CTA: query vectors, then keys and list of max_pages entries each.
struct TilesShared {
  uint4* vectors;   // [turns * blocks][steps][lane]
  float* factors;   // [turns * blocks * 8] of each query head's scores
  uint32_t* keys;
  uint16_t* list;
};

template <typename T, int kBlocks, Work kWork>
class TilesCta {
 public:
  __device__ TilesCta(const TilesKernelParams& k, char* shared)
      : k_(k), p_(k.p), warp_(threadIdx.x / 32), lane_(threadIdx.x % 32) {
    uint32_t head, rank;
    const uint32_t pair = k.splits.divide(blockIdx.x, rank);
    sequence_ = k.heads.divide(pair, head);
    head_ = head;
    peers_ = {static_cast<int>(k.splits.divisor), static_cast<int>(rank)};
    const int vectors = kWork == Work::kSelect ? 0 : k.turns * kBlocks;
    shared_.vectors = reinterpret_cast<uint4*>(shared);
    shared_.factors = reinterpret_cast<float*>(shared_.vectors + vectors * k.steps * 32);
    shared_.keys = reinterpret_cast<uint32_t*>(shared_.factors + vectors * 8);
    shared_.list = reinterpret_cast<uint16_t*>(shared_.keys + p_.max_pages);
  }

  __device__ __forceinline__ void run(TopKScratch& scratch) {
    if (p_.pdl) ptx::grid_launch_dependents();
    if (p_.pdl && (p_.late_input || kWork == Work::kSelect)) ptx::grid_dependency_wait();
    if (kWork == Work::kChoose) peers_.arrive_started();
    read_lengths();
    if (kWork != Work::kScore && keep_ == count_) {
      keep_all();
      if (kWork == Work::kChoose) peers_.wait_started();
      return;
    }
    if (kWork != Work::kSelect) score();
    if (kWork == Work::kScore) return;
    if (kWork == Work::kSelect) read_scores();
    if (kWork == Work::kChoose) {
      mark_always();
      peers_.join();
      if (peers_.rank > 0) return;
    }
    select(scratch);
  }

 private:
  // --- lengths -----------------------------------------------------------------------------------------------------
  __device__ __forceinline__ void read_lengths() {
    length_ = max(p_.sequences.cache_seqlens[sequence_], 0);
    count_ = min((length_ + p_.page_size - 1) / p_.page_size, p_.max_pages);
    first_scored_ = min(p_.rule.first, count_);
    end_scored_ = max(first_scored_, count_ - p_.rule.recent);
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
  __device__ __forceinline__ int64_t row() const {
    return (static_cast<int64_t>(sequence_) * p_.num_kv_heads + head_) * p_.max_pages;
  }

  // --- scores ------------------------------------------------------------------------------------------------------
  // Rows g and g + 8 of the 16 pages from `first` on; null where there is nothing to score.
  struct Sources {
    const uint16_t *upper, *lower;
  };
  __device__ __forceinline__ int32_t page_at(int first) const {
    const int position = first + lane_ % kRows;
    return position >= first_scored_ && position < end_scored_ ? table()[position] : -1;
  }
  __device__ __forceinline__ Sources sources(int32_t page) const {
    const int64_t dims = p_.index.planes * p_.index.dims;
    const auto* base = static_cast<const uint16_t*>(p_.index.vectors) + head_ * dims;
    const auto at = [&](int32_t id) { return id < 0 ? nullptr : base + id * (p_.num_kv_heads * dims); };
    return {at(__shfl_sync(~0u, page, lane_ / 4)), at(__shfl_sync(~0u, page, lane_ / 4 + 8))};
  }

  __device__ __forceinline__ void score() {
    const int pieces = p_.index.planes * p_.index.dims / kPieceElements;
    const int groups = (count_ + kRows - 1) / kRows;
    const int begin = groups * peers_.rank / peers_.count, end = groups * (peers_.rank + 1) / peers_.count;
    int group = begin + warp_;
    int32_t page = group < end ? page_at(group * kRows) : -1;
    RowPieces rows;
    Sources from = sources(page);
    // On their way while the query is still being written.
    load_rows(rows, from.upper, from.lower, 0, pieces, lane_);
    if (p_.pdl) ptx::grid_dependency_wait();
    put_query();
    __syncthreads();
    if (kWork == Work::kChoose) peers_.wait_started();
#pragma unroll 1
    while (group < end) {
      const int next = group + kWarps;
      const int32_t next_page = next < end ? page_at(next * kRows) : -1;
      float upper = neutral(p_.combine), lower = upper;
#pragma unroll 1
      for (int turn = 0; turn < k_.turns; ++turn) {
        float acc[kBlocks][4] = {};
#pragma unroll 1
        for (int step = 0; step < k_.steps; step += kStep) {
          if (turn > 0 || step > 0) load_rows(rows, from.upper, from.lower, 4 * step, pieces, lane_);
          multiply<T, kBlocks>(acc, rows, shared_.vectors + (turn * kBlocks * k_.steps + step) * 32, k_.steps * 32,
                               k_.steps - step, lane_);
        }
        fold_heads(acc, turn, upper, lower);
      }
      put_scores(group * kRows, upper, lower);
      group = next;
      from = sources(next_page);
      load_rows(rows, from.upper, from.lower, 0, pieces, lane_);
    }
  }

  // Heads beyond the group do not count.
  __device__ __forceinline__ void fold_heads(const float (&acc)[kBlocks][4], int turn, float& upper,
                                             float& lower) const {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int query_head = (turn * kBlocks + n) * 8 + lane_ % 4 * 2 + i;
        if (query_head >= k_.group) continue;
        const float factor = p_.index.planes == 2 ? 1.f : shared_.factors[query_head];
        upper = fold(p_.combine, upper, acc[n][i] * factor);
        lower = fold(p_.combine, lower, acc[n][i + 2] * factor);
      }
  }

  // The quad's parts together; lanes 4 g and 4 g + 1 write rows g and g + 8.
  __device__ __forceinline__ void put_scores(int first, float upper, float lower) const {
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      upper = fold(p_.combine, upper, __shfl_xor_sync(~0u, upper, step));
      lower = fold(p_.combine, lower, __shfl_xor_sync(~0u, lower, step));
    }
    const int t = lane_ % 4, position = first + lane_ / 4 + 8 * t;
    if (t > 1 || position >= count_) return;
    const float value = t == 0 ? upper : lower;
    const bool scored = position >= first_scored_ && position < end_scored_;
    if (kWork == Work::kScore) p_.scores[row() + position] = scored ? value : INFINITY;
    else if (scored) peers_.send(shared_.keys + position, key_of(value));
  }

  __device__ __forceinline__ void mark_always() const {
    if (peers_.rank > 0) return;
    for (int i = threadIdx.x; i < first_scored_; i += kThreads) shared_.keys[i] = kAlways;
    for (int i = end_scored_ + threadIdx.x; i < count_; i += kThreads) shared_.keys[i] = kAlways;
  }

  __device__ __forceinline__ void read_scores() const {
    const float* scores = p_.scores + row();
    for (int i = threadIdx.x; i < count_; i += kThreads)
      shared_.keys[i] = i >= first_scored_ && i < end_scored_ ? key_of(scores[i]) : kAlways;
    __syncthreads();
  }

  // --- the query as vectors for multiply() ---------------------------------------------------------------------------
  __device__ __forceinline__ void put_query() const { put_bounds_query(); }

  // An upper bound of q . k over a page: its minimum where a dim of the query is negative, its maximum elsewhere.
  __device__ __forceinline__ void put_bounds_query() const {
    const auto* query = static_cast<const uint16_t*>(p_.query) + sequence_ * p_.query_token_stride;
    const int half = p_.index.dims / kPieceElements, total = k_.turns * kBlocks * k_.steps * 32;
    for (int i = threadIdx.x; i < total; i += kThreads) {
      const int lane = i % 32, step = i / 32 % k_.steps, block = i / (32 * k_.steps);
      const int query_head = block * 8 + lane / 4;
      int piece = 4 * step + lane % 4;
      const bool maximum = piece >= half;
      if (maximum) piece -= half;
      uint4 value = make_uint4(0, 0, 0, 0);
      if (query_head < k_.group && piece < half) {
        value = *reinterpret_cast<const uint4*>(
            query + static_cast<int64_t>(head_ * k_.group + query_head) * p_.query_head_stride +
            piece * kPieceElements);
        uint32_t* words = reinterpret_cast<uint32_t*>(&value);
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          // All ones in the halves whose sign bit is set.
          const uint32_t negative = (words[w] >> 15 & 0x10001u) * 0xffffu;
          words[w] &= maximum ? ~negative : negative;
        }
      }
      shared_.vectors[i] = value;
    }
  }

  // --- selection -----------------------------------------------------------------------------------------------------
  __device__ __forceinline__ void keep_all() const {
    if (p_.pdl) ptx::grid_dependency_wait();  // the kernels ahead may still read what this one writes
    for (int i = peers_.rank * kThreads + threadIdx.x; i < count_; i += peers_.count * kThreads) put(i, i);
    put_length();
  }

  // Every head of a sequence keeps as many pages, the last one always.
  __device__ __forceinline__ void put_length() const {
    if (head_ == 0 && peers_.rank == 0 && threadIdx.x == 0)
      p_.selected_seqlens[sequence_] = length_ - (count_ - keep_) * p_.page_size;
  }

  __device__ __forceinline__ void put(int index, int position) const {
    p_.selected[row() + index] = table()[position];
    if (p_.positions != nullptr) p_.positions[row() + index] = position;
  }

  __device__ __forceinline__ void select(TopKScratch& scratch) const {
    const int need = keep_ - (count_ - (end_scored_ - first_scored_));
    const Cut cut = need > 0 ? find_cut(shared_.keys, first_scored_, end_scored_, need, scratch) : Cut{kAlways - 1, 0};
    list_taken(shared_.keys, count_, cut, shared_.list, scratch);
    for (int i = threadIdx.x; i < keep_; i += kThreads) put(i, shared_.list[i]);
    put_length();
  }

  const TilesKernelParams& k_;
  const TilesParams& p_;
  const int warp_, lane_;
  int sequence_, head_;
  Peers peers_;
  TilesShared shared_;
  int length_ = 0, count_ = 0;                // tokens and pages of the sequence
  int first_scored_ = 0, end_scored_ = 0;     // pages that compete
  int keep_ = 0;
};

template <typename T, int kBlocks, Work kWork>
__global__ void __launch_bounds__(kThreads, 2) tiles_kernel(const __grid_constant__ TilesKernelParams params) {
  extern __shared__ __align__(16) char shared[];
  __shared__ TopKScratch scratch;
  TilesCta<T, kBlocks, kWork>(params, shared).run(scratch);
}

}  // namespace bicl::sparse
