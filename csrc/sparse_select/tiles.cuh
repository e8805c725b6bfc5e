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
constexpr float kLeast = -1e30f;  // of a page whose centroids stand for nothing

enum class Work { kScore, kSelect, kChoose };

// Of all but the rows of centroids 2 t and 2 t + 1 of a page, t = lane % 4; the last lanes have none where there are few.
struct Remainder {
  uint2 affine;     // a and b of each
  uint32_t counts;  // keys of each, a byte
};

// Pages a warp scores at once.
constexpr int kPages = 16;

struct TilesKernelParams {
  // What is needed first stands first: parameters come from memory a line at a time.
  FastDiv splits;  // CTAs a (sequence, KV head)
  FastDiv heads;   // KV heads
  int group;       // query heads of one KV head
  int blocks;      // of 4 query heads
  int steps;       // of 4 pieces, in a row of the index
  int row_stride;  // of a head's scores in shared memory
  int page_log2;   // of tokens a page
  TilesParams p;
};

// Shared memory beside TopKScratch.
struct TilesShared {
  uint4* vectors;  // [blocks][steps][2][lane], the queries
  float2* scales;  // [4 blocks], of the queries' products; sum of their elements
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
    int bytes = (vector_count(k, work) + query_count(k, work) + weight_count(k, work)) * 16 + k.blocks * 32;
    if (work != Work::kScore)
      bytes += k.group * (kMaxCluster * 8 + 4 + k.row_stride * 4) + k.p.max_pages * 10 + 16;
    return bytes;
  }
  __device__ __forceinline__ TilesShared(char* base, const TilesKernelParams& k, Work work) {
    vectors = reinterpret_cast<uint4*>(base);
    queries = vectors + vector_count(k, work);
    weights = reinterpret_cast<float4*>(queries + query_count(k, work));
    scales = reinterpret_cast<float2*>(weights + weight_count(k, work));
    pages = reinterpret_cast<int32_t*>(scales + 4 * k.blocks);
    stats = reinterpret_cast<float2*>(pages + (k.p.max_pages + 3) / 4 * 4);
    factors = reinterpret_cast<float*>(stats + kMaxCluster * k.group);
    scores = factors + k.group;
    keys = reinterpret_cast<uint32_t*>(scores + k.group * k.row_stride);
    list = reinterpret_cast<uint16_t*>(keys + k.p.max_pages);
  }
};

template <int kCentroids, Work kWork>
class TilesCta {
#if __CUDA_ARCH__ >= 900
  static constexpr int kOctets = kPages / 8;
#else
  static constexpr int kOctets = kCentroids == 8 ? 1 : kPages / 8;  // ptxas would spill a second one
#endif

 public:
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
    const float share = __fmul_rn(p_.sparsity[sequence_], p_.share);
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
  // The lane's of `span` pages from `first` on; -1 where there is nothing to score.
  __device__ __forceinline__ int32_t page_at(int first, int span) const {
    const int place = lane_ % kPages, position = first + place;
    return place < span && position < end_counted() ? table()[position] : -1;
  }

  // Eight pages on their way, of which the lane has a part of page g.
  struct Octet {
    const uint8_t* record;  // null: nothing to score
    Remainder remainder;
    PagePieces<kCentroids> pieces;
  };

  __device__ __forceinline__ void load(Octet& octet, int32_t page, int first_lane) const {
    const int32_t id = __shfl_sync(~0u, page, first_lane + lane_ / 4);
    octet.record = id < 0 ? nullptr : p_.index.records + id * p_.index.record_bytes;
    octet.remainder = load_remainder(octet.record);
    load_rows(octet, 0);
  }
  __device__ __forceinline__ void load_rows(Octet& octet, int step) const {
    const int row_bytes = p_.index.row_bytes;
    const uint8_t* rows = octet.record == nullptr ? nullptr : octet.record + head_ * kCentroids * row_bytes;
    load_pieces(octet.pieces, rows, row_bytes, step, lane_);
  }

  // An octet is scored while the other's rows come.
  __device__ __forceinline__ void score() {
    const int span = end_ - begin_ <= kWarps * 8 ? 8 : kOctets * 8;  // of a warp
    int first = begin_ + warp_ * span, next = first + kWarps * span;
    int32_t page = page_at(first, span);
    fetch();
    Octet octets[kOctets];
#pragma unroll
    for (int i = 0; i < kOctets; ++i) load(octets[i], page, 8 * i);
    page = page_at(next, span);
    prepare();
#pragma unroll 1
    while (first < end_) {
#pragma unroll
      for (int i = 0; i < kOctets; ++i) {
        if (8 * i < span && first + 8 * i < end_) score(octets[i], first + 8 * i);
        if (next < end_) load(octets[i], page, 8 * i);
      }
      first = next;
      next += kWarps * span;
      page = page_at(next, span);
    }
    __syncthreads();
  }

  __device__ __forceinline__ void score(Octet& octet, int first) const {
#pragma unroll 1
    for (int block = 0; block < k_.blocks; ++block) {
      int acc[kCentroids / 2][4] = {};
#pragma unroll 1
      for (int step = 0; step < k_.steps; ++step) {
        if (k_.steps > 1 && block + step > 0) load_rows(octet, step);
        multiply(acc, octet.pieces, shared_.vectors + (block * k_.steps + step) * 64, lane_);
      }
      put_scores(acc, octet.remainder, block * 4, first);
    }
  }

  __device__ __forceinline__ Remainder load_remainder(const uint8_t* record) const {
    const int rows = p_.num_kv_heads * kCentroids, own = head_ * kCentroids + lane_ % 4 * 2;
    if (record == nullptr || lane_ % 4 * 2 >= kCentroids) return {};
    const uint8_t* affine = record + rows * p_.index.row_bytes;
    return {__ldg(reinterpret_cast<const uint2*>(affine + own * 4)),
            __ldg(reinterpret_cast<const uint16_t*>(affine + rows * 4 + own))};
  }

  // Small reads go ahead of the rows: behind them, memory answers after microseconds.
  __device__ __forceinline__ void fetch() const {
    if (threadIdx.x < p_.head_dim / 4)
      ptx::cp_async_16(ptx::smem_address(shared_.weights + threadIdx.x), p_.weights + 4 * threadIdx.x);
    if (p_.pdl) ptx::grid_dependency_wait();
    const int chunks = p_.head_dim / 8;
#pragma unroll 1
    for (int query_head = warp_; query_head < k_.group; query_head += kWarps)
      if (lane_ < chunks)
        ptx::cp_async_16(ptx::smem_address(shared_.queries + query_head * chunks + lane_),
                         static_cast<const uint16_t*>(p_.query) + sequence_ * p_.query_token_stride +
                             static_cast<int64_t>(head_ * k_.group + query_head) * p_.query_head_stride + lane_ * 8);
    ptx::cp_async_commit();
  }

  __device__ __forceinline__ void prepare() const {
    ptx::cp_async_wait<0>();
    __syncthreads();
    put_queries();
    __syncthreads();
    if (kWork == Work::kChoose && peers_.rank == 0) fetch_table();  // for select()
    ptx::cp_async_commit();
  }

  __device__ __forceinline__ void fetch_table() const {
#pragma unroll 1
    for (int i = threadIdx.x; i < count_; i += kThreads)
      ptx::cp_async_4(ptx::smem_address(shared_.pages + i), table() + i);
  }

  static __device__ __forceinline__ float2 halves(uint32_t pair) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  }

  // Of page g of eight, from `first` on: log-sum-exp over its centroids, in bits. Query head t of four.
  __device__ __forceinline__ void put_scores(const int (&acc)[kCentroids / 2][4], const Remainder& remainder,
                                             int first_head, int first) const {
    const int query_head = first_head + lane_ % 4, position = first + lane_ / 4;
    const float2 query = shared_.scales[query_head];
    const __half2 sizes = __floats2half2_rn(__log2f(static_cast<float>(remainder.counts & 0xff)),
                                            __log2f(static_cast<float>(remainder.counts >> 8)));
    float values[kCentroids], most = kLeast, sum = 0.f;
#pragma unroll
    for (int pair = 0; pair < kCentroids / 2; ++pair) {
      const int from = lane_ / 4 * 4 + pair;
      const float2 first = halves(__shfl_sync(~0u, remainder.affine.x, from));
      const float2 second = halves(__shfl_sync(~0u, remainder.affine.y, from));
      const float2 size = halves(__shfl_sync(~0u, *reinterpret_cast<const uint32_t*>(&sizes), from));
      const int (&product)[4] = acc[pair];
      values[2 * pair] = fmaf(query.x * first.x, static_cast<float>(kQueryStep * product[0] + product[1]),
                              fmaf(query.y, first.y, size.x));
      values[2 * pair + 1] = fmaf(query.x * second.x, static_cast<float>(kQueryStep * product[2] + product[3]),
                                  fmaf(query.y, second.y, size.y));
      most = fmaxf(most, fmaxf(values[2 * pair], values[2 * pair + 1]));
    }
#pragma unroll
    for (int c = 0; c < kCentroids; ++c) sum += ptx::exp2_approx(values[c] - most);
    if (query_head >= k_.group || position >= end_) return;
    const float score = most + __log2f(sum);
    if (kWork == Work::kScore) scores_of(query_head)[position] = score / kLog2e;
    else shared_.scores[query_head * k_.row_stride + position - begin_] = score;
  }

  __device__ __forceinline__ void read_scores() const {
#pragma unroll 1
    for (int query_head = 0; query_head < k_.group; ++query_head)
#pragma unroll 2
      for (int i = threadIdx.x; i < count_; i += kThreads)
        shared_.scores[query_head * k_.row_stride + i] = scores_of(query_head)[i] * kLog2e;
    fetch_table();
    ptx::cp_async_commit();
    __syncthreads();
  }

  // The queries of the group, weighted, as integers of 15 bits in two columns, for multiply(). A warp a head, a lane the
  // eight elements of a word.
  __device__ __forceinline__ void put_queries() const {
    const int words = p_.index.row_bytes / 4;
#pragma unroll 1
    for (int query_head = warp_; query_head < k_.group; query_head += kWarps) {
      float values[8] = {};
      if (lane_ * 8 < p_.head_dim) {
        const float4 weights[2] = {shared_.weights[lane_ * 2], shared_.weights[lane_ * 2 + 1]};
        const uint4 raw = shared_.queries[query_head * p_.head_dim / 8 + lane_];
        const float each[8] = {weights[0].x, weights[0].y, weights[0].z, weights[0].w,
                               weights[1].x, weights[1].y, weights[1].z, weights[1].w};
#pragma unroll
        for (int i = 0; i < 8; ++i)
          values[i] = each[i] * (p_.query_dtype == DType::kBFloat16
                                     ? to_float(reinterpret_cast<const __nv_bfloat16*>(&raw)[i])
                                     : to_float(reinterpret_cast<const __half*>(&raw)[i]));
      }
      float most = 0.f;
#pragma unroll
      for (int i = 0; i < 8; ++i) most = fmaxf(most, fabsf(values[i]));
      most = warp_max(most);
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
      if (lane_ < words) {
        auto* pairs = reinterpret_cast<uint2*>(shared_.vectors + (query_head / 4 * k_.steps + lane_ / 16) * 64);
        uint2* at = pairs + (lane_ % 4 / 2 * 32 + query_head % 4 * 8 + lane_ / 4 % 4) * 2 + lane_ % 2;
        at[0] = make_uint2(columns[0][0], columns[0][1]);
        at[4 * 2] = make_uint2(columns[1][0], columns[1][1]);
      }
      const float scale = p_.scale * kLog2e * step;
      if (lane_ == 0) shared_.scales[query_head] = make_float2(scale / 16, scale * static_cast<float>(sum));
    }
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
    ptx::cp_async_wait<0>();  // the page table; barriers follow
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
