// Which pages a decode step reads: scores of all pages of a (sequence, KV head) against its queries, and the best.
//
//   score    a query head's score of a page: the log-sum-exp of its scores of the page's centroids, each counted as
//            often as it stands for a key: what the page would weigh if its keys were their centroids
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

constexpr float kLog2e = 1.4426950408889634f;

enum class Work { kScore, kSelect, kChoose };

// Pages a warp scores at once.
constexpr int warp_pages(int centroids) { return centroids == 8 ? 8 : 16; }

struct TilesKernelParams {
  TilesParams p;
  FastDiv heads;   // KV heads
  FastDiv splits;  // CTAs a (sequence, KV head)
  int group;       // query heads of one KV head
  int blocks;      // of 8 query heads
  int steps;       // of 4 pieces, in a row of the index
  int row_stride;  // of a head's scores in shared memory
  int page_log2;   // of tokens a page
};

// Shared memory beside TopKScratch.
struct TilesShared {
  uint4* vectors;  // [blocks][steps][2][lane], the queries
  uint4* queries;  // [group][head_dim] as they come
  float4* weights; // [head_dim]
  float2* stats;   // [cluster][group]: greatest score and sum of a CTA's share
  float* factors;  // [group]
  float* scores;   // [group][row_stride] of the CTA's share
  int32_t* pages;  // [max_pages], the sequence's page table
  uint32_t* keys;  // [max_pages]
  uint16_t* list;  // [max_pages]

  __host__ __device__ static int vector_count(const TilesKernelParams& k, Work work) {
    return work == Work::kSelect ? 0 : k.blocks * k.steps * 64;
  }
  static __host__ __device__ int query_count(const TilesKernelParams& k, Work work) {
    return work == Work::kSelect ? 0 : k.group * k.p.head_dim / 8;
  }
  static __host__ __device__ int weight_count(const TilesKernelParams& k, Work work) {
    return work == Work::kSelect ? 0 : k.p.head_dim / 4;
  }
  static int bytes(const TilesKernelParams& k, Work work) {
    int bytes = (vector_count(k, work) + query_count(k, work) + weight_count(k, work)) * 16;
    if (work != Work::kScore)
      bytes += k.group * (kMaxCluster * 8 + 4 + k.row_stride * 4) + k.p.max_pages * 10 + 16;
    return bytes;
  }
  __device__ __forceinline__ TilesShared(char* base, const TilesKernelParams& k, Work work) {
    vectors = reinterpret_cast<uint4*>(base);
    queries = vectors + vector_count(k, work);
    weights = reinterpret_cast<float4*>(queries + query_count(k, work));
    pages = reinterpret_cast<int32_t*>(weights + weight_count(k, work));
    stats = reinterpret_cast<float2*>(pages + (k.p.max_pages + 3) / 4 * 4);
    factors = reinterpret_cast<float*>(stats + kMaxCluster * k.group);
    scores = factors + k.group;
    keys = reinterpret_cast<uint32_t*>(scores + k.group * k.row_stride);
    list = reinterpret_cast<uint16_t*>(keys + k.p.max_pages);
  }
};

template <int kCentroids, Work kWork>
class TilesCta {
 public:
  static constexpr int kPages = warp_pages(kCentroids), kOctets = kPages / 8;

  __device__ __forceinline__ TilesCta(const TilesKernelParams& k, char* shared)
      : k_(k), p_(k.p), warp_(threadIdx.x / 32), lane_(threadIdx.x % 32), shared_(shared, k, kWork) {
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
    if (kWork == Work::kChoose && peers_.count > 1 && count_ <= kWarps * kPages) {
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
    first_competing_ = min(p_.rule.first, count_);
    end_competing_ = max(first_competing_, count_ - p_.rule.recent);
    begin_ = share_begin(peers_.rank);
    end_ = share_begin(peers_.rank + 1);
    if (kWork == Work::kScore) return;
    const float share = p_.sparsity[sequence_];
    // tiles_to_keep(): each operation rounded, as there.
    const int skipped = static_cast<int>(floorf(__fadd_rn(__fmul_rn(static_cast<float>(count_), share), 1.f / 64)));
    const int kept = min(max(count_ - skipped, max(p_.rule.floor, p_.rule.first + p_.rule.recent)), p_.rule.max_k);
    keep_ = share > 0.f ? min(kept, count_) : count_;
  }

  // First page of a CTA's share.
  __device__ __forceinline__ int share_begin(int rank) const {
    if (peers_.count == 1) return rank * count_;
    const int groups = (count_ + kPages - 1) / kPages;
    return min(static_cast<int>(k_.splits.divide(groups * rank)) * kPages, count_);
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
  // The lane's of the pages from `first` on; -1 where there is nothing to score.
  __device__ __forceinline__ int32_t page_at(int first) const {
    const int position = first + lane_ % kPages;
    return position >= begin_ && position < end_counted() ? table()[position] : -1;
  }

  // Record of page g of eight.
  __device__ __forceinline__ const uint8_t* record(int32_t page, int octet) const {
    const int32_t id = __shfl_sync(~0u, page, 8 * octet + lane_ / 4);
    return id < 0 ? nullptr : p_.index.records + id * p_.index.record_bytes;
  }

  __device__ __forceinline__ void score() {
    const int row_bytes = p_.index.row_bytes, own_rows = head_ * kCentroids * row_bytes;
    const int own_counts = p_.num_kv_heads * kCentroids * row_bytes + head_ * kCentroids;
    int first = begin_ + warp_ * kPages;
    int32_t page = page_at(first);
    fetch();
    bool ready = false;
#pragma unroll 1
    do {
      const uint8_t* records[kOctets];
      Counts counts[kOctets];
#pragma unroll
      for (int octet = 0; octet < kOctets; ++octet) {
        records[octet] = record(page, octet);
        counts[octet] = load_counts(records[octet], own_counts);
      }
      page = page_at(first + kWarps * kPages);
      PagePieces<kCentroids> pieces[kOctets];
#pragma unroll 1
      for (int block = 0; block < k_.blocks; ++block) {
        float acc[kOctets][kCentroids / 2][4] = {};
#pragma unroll 1
        for (int step = 0; step < k_.steps; step += kSteps) {
          if (block == 0 || k_.steps > kSteps)
#pragma unroll
            for (int octet = 0; octet < kOctets; ++octet)
              load_pieces(pieces[octet], records[octet] == nullptr ? nullptr : records[octet] + own_rows, row_bytes, step,
                          lane_);
          if (!ready) prepare();
          ready = true;
          const uint4* vectors = shared_.vectors + (block * k_.steps + step) * 64;
#pragma unroll
          for (int octet = 0; octet < kOctets; ++octet)
            multiply(acc[octet], pieces[octet], vectors, k_.steps - step, lane_);
        }
#pragma unroll
        for (int octet = 0; octet < kOctets; ++octet) put_scores(acc[octet], counts[octet], block * 8, first + 8 * octet);
      }
      first += kWarps * kPages;
    } while (first < end_);
    __syncthreads();
  }

  // Keys of each centroid of a page, a byte each.
  using Counts = std::conditional_t<kCentroids == 8, uint64_t, uint32_t>;
  __device__ __forceinline__ Counts load_counts(const uint8_t* record, int offset) const {
    if (record == nullptr) return 0;
    if constexpr (kCentroids == 8) return __ldg(reinterpret_cast<const unsigned long long*>(record + offset));
    else if constexpr (kCentroids == 4) return __ldg(reinterpret_cast<const uint32_t*>(record + offset));
    else return __ldg(reinterpret_cast<const uint16_t*>(record + offset));
  }

  // Small reads go ahead of the rows: behind them, memory answers after microseconds.
  __device__ __forceinline__ void fetch() const {
    for (int i = threadIdx.x; i < p_.head_dim / 4; i += kThreads)
      ptx::cp_async_16(ptx::smem_address(shared_.weights + i), p_.weights + 4 * i);
    if (kWork == Work::kChoose && peers_.rank == 0) fetch_table();
    if (p_.pdl) ptx::grid_dependency_wait();
    const int chunks = p_.head_dim / 8;
    const auto* query = static_cast<const uint16_t*>(p_.query) + sequence_ * p_.query_token_stride +
                        static_cast<int64_t>(head_ * k_.group) * p_.query_head_stride;
    for (int i = threadIdx.x; i < k_.group * chunks; i += kThreads)
      ptx::cp_async_16(ptx::smem_address(shared_.queries + i),
                       query + i / chunks * p_.query_head_stride + i % chunks * 8);
    ptx::cp_async_commit();
  }

  __device__ __forceinline__ void prepare() const {
    ptx::cp_async_wait<0>();
    __syncthreads();
    put_queries();
    __syncthreads();
  }

  __device__ __forceinline__ void fetch_table() const {
    for (int i = threadIdx.x; i < count_; i += kThreads)
      ptx::cp_async_4(ptx::smem_address(shared_.pages + i), table() + i);
  }

  // Of page g of eight, from `first` on: log-sum-exp over its centroids, in bits.
  __device__ __forceinline__ void put_scores(const float (&acc)[kCentroids / 2][4], Counts counts, int first_head,
                                             int first) const {
    const int position = first + lane_ / 4;
    const float scale = p_.scale * kLog2e;
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      float values[kCentroids], most = -INFINITY, sum = 0.f;
#pragma unroll
      for (int c = 0; c < kCentroids; ++c) {
        values[c] = acc[c / 2][c % 2 * 2 + column] * scale;
        if (count_of(counts, c) != 0) most = fmaxf(most, values[c]);
      }
#pragma unroll
      for (int c = 0; c < kCentroids; ++c)
        if (count_of(counts, c) != 0) sum += count_of(counts, c) * ptx::exp2_approx(values[c] - most);
      const float score = most + __log2f(sum);
      const int query_head = first_head + lane_ % 4 * 2 + column;
      if (query_head >= k_.group || position >= end_) continue;
      if (kWork == Work::kScore) scores_of(query_head)[position] = score / kLog2e;
      else shared_.scores[query_head * k_.row_stride + position - begin_] = score;
    }
  }
  static __device__ __forceinline__ int count_of(Counts counts, int c) { return counts >> 8 * c & 0xff; }

  __device__ __forceinline__ void read_scores() const {
#pragma unroll 1
    for (int query_head = 0; query_head < k_.group; ++query_head)
#pragma unroll 2
      for (int i = threadIdx.x; i < count_; i += kThreads)
        shared_.scores[query_head * k_.row_stride + i] = scores_of(query_head)[i] * kLog2e;
    fetch_table();
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncthreads();
  }

  // The queries of the group, weighted, in fp16, as vectors for multiply().
  __device__ __forceinline__ void put_queries() const {
    const int total = 2 * k_.blocks * k_.steps;
#pragma unroll 1
    for (int item = warp_; item < total; item += kWarps) {
      int block = 0, step = item / 2;
      while (step >= k_.steps) step -= k_.steps, ++block;
      const int query_head = block * 8 + lane_ / 4;
      const int dim = (4 * step + lane_ % 4) * kPieceBytes + item % 2 * 8;
      uint4 packed = make_uint4(0, 0, 0, 0);
      if (query_head < k_.group && dim < p_.head_dim) {
        const float4 weights[2] = {shared_.weights[dim / 4], shared_.weights[dim / 4 + 1]};
        const uint4 raw = shared_.queries[(query_head * p_.head_dim + dim) / 8];
        packed = p_.query_dtype == DType::kBFloat16 ? weighted<__nv_bfloat16>(raw, weights)
                                                    : weighted<__half>(raw, weights);
      }
      shared_.vectors[item * 32 + lane_] = packed;
    }
  }
  template <typename T>
  static __device__ __forceinline__ uint4 weighted(const uint4& raw, const float4 (&weights)[2]) {
    const auto* values = reinterpret_cast<const T*>(&raw);
    const auto pair = [&](int i, float first, float second) {
      return ptx::pack(to_float(values[i]) * first, to_float(values[i + 1]) * second, __half{});
    };
    return make_uint4(pair(0, weights[0].x, weights[0].y), pair(2, weights[0].z, weights[0].w),
                      pair(4, weights[1].x, weights[1].y), pair(6, weights[1].z, weights[1].w));
  }

  // --- combining -----------------------------------------------------------------------------------------------------
  // Pages of this CTA's share up to here are scored and count in the softmax, those that are kept anyway at the
  // sequence's begin, too. The newest have no index yet, or one that is just being written.
  __device__ __forceinline__ int end_counted() const { return min(end_, count_ - p_.rule.recent); }

  // Each head's scores to exp(score - greatest of the share), and the factor that makes them its softmax over all
  // pages that count. A warp a head.
  __device__ __forceinline__ void normalise() const {
#pragma unroll 1
    for (int query_head = warp_; query_head < k_.group; query_head += kWarps) {
      float* scores = shared_.scores + query_head * k_.row_stride - begin_;
      float most = -INFINITY, sum = 0.f;
#pragma unroll 4
      for (int i = begin_ + lane_; i < end_counted(); i += 32) most = fmaxf(most, scores[i]);
      most = warp_max(most);
#pragma unroll 4
      for (int i = begin_ + lane_; i < end_counted(); i += 32) {
        const float weight = ptx::exp2_approx(scores[i] - most);
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
      const float all = warp_sum(part.x == -INFINITY ? 0.f : part.y * ptx::exp2_approx(part.x - most));
      const float own = __shfl_sync(~0u, part.x, peers_.rank);
      if (lane_ == 0) shared_.factors[query_head] = __fdividef(ptx::exp2_approx(own - most), all);
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
      if (i >= first_competing_ && i < end_competing_) {
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
    const int need = keep_ - (count_ - (end_competing_ - first_competing_));
    const Cut cut = need > 0 ? find_cut(shared_.keys, first_competing_, end_competing_, need, scratch) : Cut{kAlways - 1, 0};
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
  int first_competing_ = 0, end_competing_ = 0;  // pages that compete
  int begin_ = 0, end_ = 0;                // pages of this CTA's share
  int keep_ = 0;
};

template <int kCentroids, Work kWork>
__global__ void __launch_bounds__(kThreads, 2) tiles_kernel(const __grid_constant__ TilesKernelParams params) {
  extern __shared__ __align__(16) char shared[];
  __shared__ TopKScratch scratch;
  TilesCta<kCentroids, kWork>(params, shared).run(scratch);
}

}  // namespace bicl::sparse
