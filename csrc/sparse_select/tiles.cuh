// Which pages a decode step reads: scores of all pages of a (sequence, KV head) against its queries, and the best.
//
//   score    each query head's of each page (score.cuh)
//   agree    the heads of a group on one key a page (agree.cuh)
//   select   first and recent pages, and the best of the rest, ascending in position (topk.cuh)
//
// Choosing does all three in one launch: the CTAs of a cluster score a share of the pages each and send what they
// agreed on to the first, which selects. Everything is read on the device: a captured launch is right for any lengths.
#pragma once

#include "agree.cuh"
#include "score.cuh"
#include "tiles_cta.cuh"

namespace bicl::sparse {

template <int kCentroids, Work kWork, bool kPlain>
class TilesCta {
 public:
  __device__ __forceinline__ TilesCta(const TilesKernelParams& k, char* shared) : c_(k, shared, kWork) {
    uint32_t head, rank;
    const uint32_t pair = k.splits.divide(blockIdx.x, rank);
    c_.sequence = k.heads.divide(pair, head);
    c_.head = head;
    share_with({static_cast<int>(k.splits.divisor), static_cast<int>(rank)});
  }

  __device__ __forceinline__ void run(TopKScratch& scratch) {
    const Scorer<kCentroids, kWork, kPlain> scorer(c_);
    if (c_.p.pdl && kWork != Work::kChoose) ptx::grid_launch_dependents();
    if (c_.p.pdl && (c_.p.late_input || kWork == Work::kSelect)) ptx::grid_dependency_wait();
    if (kWork == Work::kChoose) c_.peers.arrive_started();
    int32_t entry = kWork == Work::kSelect ? 0 : scorer.first_entry();
    read_lengths();
    if (kWork != Work::kScore && c_.keep == c_.count) {
      if (kWork == Work::kChoose) c_.peers.wait_started();
      keep_all();
      return;
    }
    if (kWork == Work::kChoose && c_.peers.count > 1 && c_.count <= kAloneTurns * kOctet * c_.k.warps) {
      // Little to share: quicker alone than with barriers.
      c_.peers.wait_started();
      if (c_.peers.rank > 0) return;
      share_with({1, 0});
      entry = scorer.first_entry();
    }
    const auto fetch = [&] {
      if (kWork != Work::kScore && c_.peers.rank == 0) fetch_table(scratch);
    };
    const Agreement<kPlain> agreement(c_);
    if (kWork == Work::kSelect) fetch(), agreement.read_scores();
    else scorer.run(entry, fetch);
    if (kWork == Work::kScore) return;
    if (kWork == Work::kChoose) c_.peers.wait_started();
    if (c_.p.combine == Combine::kSoftmax) agreement.normalise();
    agreement.send_keys();
    c_.peers.join();
    if (c_.peers.rank > 0) return;
    if (kWork == Work::kChoose && lets_attention_in()) ptx::grid_launch_dependents();
    select(scratch);
  }

 private:
  __device__ __forceinline__ void share_with(const Peers& peers) {
    c_.peers = peers;
    c_.octets = {peers.rank * c_.k.warps + c_.warp, peers.count * c_.k.warps};
  }

  __device__ __forceinline__ void read_lengths() {
    const TilesParams& p = c_.p;
    const int tokens = p.sequences.cache_seqlens[c_.sequence];
    const float sparsity = kWork == Work::kScore ? 0.f : p.sparsity[c_.sequence];
    c_.length = max(tokens, 0);
    c_.count = min((c_.length + p.page_size - 1) >> c_.k.page_log2, p.max_pages);
    c_.end_counted = c_.count - p.rule.recent;
    c_.first_competing = min(p.rule.first, c_.count);
    c_.end_competing = max(c_.first_competing, c_.end_counted);
    if (kWork == Work::kScore) return;
    const float share = __fmul_rn(sparsity, p.share);
    // tiles_to_keep(): each operation rounded, as there.
    const int skipped = static_cast<int>(floorf(__fadd_rn(__fmul_rn(static_cast<float>(c_.count), share), 1.f / 64)));
    const int kept = min(max(c_.count - skipped, max(p.rule.floor, p.rule.first + p.rule.recent)), p.rule.max_k);
    c_.keep = share > 0.f ? min(kept, c_.count) : c_.count;
  }

  __device__ __forceinline__ void keep_all() const {
    if (c_.p.pdl) ptx::grid_dependency_wait();  // the kernels ahead may still read what this one writes
const int threads = c_.peers.count * blockDim.x;
#pragma unroll 1
    for (int i = c_.peers.rank * blockDim.x + threadIdx.x; i < c_.count; i += threads)
      put(i, i, c_.table()[i]);
    put_length();
  }

  // For select(), while others still score.
  __device__ __forceinline__ void fetch_table(TopKScratch& scratch) const {
#pragma unroll 1
    for (int i = threadIdx.x; i < c_.count; i += blockDim.x)
      ptx::cp_async_4(ptx::smem_address(c_.shared.pages + i), c_.table() + i);
    ptx::cp_async_commit();
    scratch.clear();
  }

  __device__ __forceinline__ void select(TopKScratch& scratch) const {
    ptx::cp_async_wait<0>();  // the page table; barriers follow
    const int need = c_.keep - (c_.count - (c_.end_competing - c_.first_competing));
    Cut cut = {kAlways - 1, 0};
    if (need > 0) {
      uint32_t low = kAlways, high = 0;
      for (int w = c_.lane; w < c_.octets.workers; w += 32) {
        low = min(low, c_.shared.ranges[w].x);
        high = max(high, c_.shared.ranges[w].y);
      }
      low = __reduce_min_sync(~0u, low);
      high = __reduce_max_sync(~0u, high);
      cut = find_cut(c_.shared.keys, c_.first_competing, c_.end_competing, need, low, high, scratch);
    }
    for_each_taken(c_.shared.keys, c_.count, cut, scratch,
                   [&](int number, int position) { put(number, position, c_.shared.pages[position]); });
    put_length();
  }

  __device__ __forceinline__ void put(int number, int position, int32_t page) const {
    c_.p.selected[c_.row() + number] = page;
    if (c_.p.positions != nullptr) c_.p.positions[c_.row() + number] = position;
  }

  // While the last CTAs still run, one of each cluster, and not sooner: what came early would sit where few CTAs fit, and
  // stay there. As it is a GPC with few SMs has no room left for one of attention's clusters of 8. Where those of a lone
  // request then lie 5 and 3 on the halves of the card they read at 5/6 of its speed: if they read for long they come
  // when all have ended, 1 us later.
  __device__ __forceinline__ bool lets_attention_in() const {
    const int pairs = c_.p.sequences.batch * c_.p.num_kv_heads;
    const bool leaves_sms_idle = 2 * kMaxCluster * pairs <= c_.p.num_sms;
    return c_.p.pdl && (!leaves_sms_idle || pairs * (c_.keep << c_.k.page_log2) <= kMostEarlyTokens);
  }

  // Every head of a sequence keeps as many pages, the last one always.
  __device__ __forceinline__ void put_length() const {
    if (c_.head == 0 && c_.peers.rank == 0 && threadIdx.x == 0)
      c_.p.selected_seqlens[c_.sequence] = c_.length - (c_.count - c_.keep) * c_.p.page_size;
  }

  static constexpr int kAloneTurns = 2;
  static constexpr int kMostEarlyTokens = 1 << 17;  // of a KV head each

  TilesContext c_;
};

template <int kCentroids, Work kWork, bool kPlain>
__global__ void __launch_bounds__(32 * kMaxWarps, 1) tiles_kernel(const __grid_constant__ TilesKernelParams params) {
  extern __shared__ __align__(16) char shared[];
  __shared__ TopKScratch scratch;
  TilesCta<kCentroids, kWork, kPlain>(params, shared).run(scratch);
}

}  // namespace bicl::sparse
