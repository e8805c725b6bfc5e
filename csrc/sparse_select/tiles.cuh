// Which pages a decode step reads: scores of all pages of a (sequence, KV head) against its queries, and the best.
//
//   score   each query head's of each page (score.cuh): a warp eight pages
//   pick    the best of each stratum (pick.cuh): further warps, while the others score the next
//
// Pages compete in strata of kStratumTokens, which lie all over the sequence, and each stratum takes as many as any other.
// So nobody waits for the whole sequence: a CTA has strata of its own, and nothing goes from one to another. Everything is
// read on the device: a captured launch is right for any lengths.
#pragma once

#include "pick.cuh"
#include "score.cuh"

namespace bicl::sparse {

template <int kCentroids, Work kWork, bool kPlain>
class TilesCta {
 public:
  __device__ __forceinline__ TilesCta(const TilesKernelParams& k, char* shared) : c_(k, shared, kWork) {}

  __device__ __forceinline__ void run() {
    if (c_.p.pdl && kWork == Work::kScore) ptx::grid_launch_dependents();
    if (c_.p.pdl && c_.p.late_input) ptx::grid_dependency_wait();
    read_row();
    if (kWork == Work::kScore) return score_all();
    if (c_.row.keep == c_.row.count) return keep_all();
    if (c_.rank < c_.row.strata) choose();
  }

 private:
  __device__ __forceinline__ void read_row() {
    const TilesParams& p = c_.p;
    const int tokens = p.sequences.cache_seqlens[c_.sequence];
    const float sparsity = kWork == Work::kScore ? 0.f : p.sparsity[c_.sequence];
    TilesRow& row = c_.row;
    row.length = max(tokens, 0);
    row.count = min((row.length + p.page_size - 1) >> c_.k.page_log2, p.max_pages);
    row.begin = min(p.rule.first, row.count);
    row.end = max(row.begin, row.count - p.rule.recent);
    if (kWork == Work::kScore) return;
    const float share = __fmul_rn(sparsity, p.share);
    // tiles_to_keep(): each operation rounded, as there.
    const int skipped = static_cast<int>(floorf(__fadd_rn(__fmul_rn(static_cast<float>(row.count), share), 1.f / 64)));
    const int kept = min(max(row.count - skipped, max(p.rule.floor, p.rule.first + p.rule.recent)), p.rule.max_k);
    row.keep = share > 0.f ? min(kept, row.count) : row.count;
    row.need = row.keep - (row.count - (row.end - row.begin));
    row.strata = max(1, (row.end - row.begin + kStratum - 1) / kStratum);
  }

  __device__ __forceinline__ void score_all() const {
    const int base = kOctet * (c_.rank * c_.k.warps + c_.warp), step = kOctet * c_.splits() * c_.k.warps;
    const auto page_at = [&](int turn, int place) {
      const int page = base + turn * step + place;
      return page < c_.row.end ? page : -1;
    };
    const Scorer<kCentroids, kPlain, decltype(page_at)> scorer(c_, max(0, c_.row.end - base + step - 1) / step, page_at);
    scorer.run([] {},
               [&](int, int query_head, int, int page, float score) {
                 c_.p.scores[c_.row_offset() * c_.k.group + static_cast<int64_t>(query_head) * c_.p.max_pages + page] =
                     score / kLog2e;
               },
               [](int) {});
  }

  __device__ __forceinline__ void keep_all() const {
    if (c_.p.pdl) ptx::grid_dependency_wait();  // the kernels ahead may still read what this one writes
#pragma unroll 1
    for (int i = c_.rank * blockDim.x + threadIdx.x; i < c_.row.count; i += c_.splits() * blockDim.x)
      put(i, i, c_.table()[i]);
    put_length();
  }

  __device__ __forceinline__ void choose() const {
    const TilesRow& row = c_.row;
    const int turns = (row.strata - c_.rank + c_.splits() - 1) / c_.splits();
    const Picker<kStratum, kPlain> picker(c_);
    const int picking = c_.picker();
    if (picking == 0) picker.clear_firsts();
    const auto page_at = [&](int turn, int place) {
      const int first = kOctet * turn + place;
      if (picking >= 0) return first < row.begin ? first : -1;
      return row.page(c_.rank + turn * c_.splits(), kOctet * c_.warp + place);
    };
    const int octets = picking < 0 ? turns : picking == 0 ? (row.begin + kOctet - 1) / kOctet : 0;
    const Scorer<kCentroids, kPlain, decltype(page_at)> scorer(c_, octets, page_at);
    scorer.run([&] { if (c_.rank == 0) put_ends(); },
               [&](int turn, int query_head, int place, int, float score) {
                 c_.scores(picking < 0 ? turn : 0, query_head)[c_.warp * kOctet + place] = score;
               },
               [&](int turn) {
                 if (picking < 0) __syncthreads();
                 else picker.add_firsts(turn);
               });
    if (picking < 0) return;
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
      const auto candidate = picker.candidate(turn);
      __syncthreads();
      if (turn == turns - 1 && lets_attention_in()) ptx::grid_launch_dependents();
      picker.pick(turn, candidate, [&](int number, int position, int32_t page) { put(number, position, page); });
    }
  }

  // The pages that do not compete.
  __device__ __forceinline__ void put_ends() const {
    const TilesRow& row = c_.row;
#pragma unroll 1
    for (int i = threadIdx.x; i < row.keep - row.need; i += blockDim.x) {
      const bool is_first = i < row.begin;
      const int position = is_first ? i : row.end + i - row.begin;
      put(is_first ? i : row.need + i, position, c_.table()[position]);
    }
    put_length();
  }

  __device__ __forceinline__ void put(int number, int position, int32_t page) const {
    c_.p.selected[c_.row_offset() + number] = page;
    if (c_.p.positions != nullptr) c_.p.positions[c_.row_offset() + number] = position;
  }

  // While the last CTAs still run, and not sooner: what came early would sit where few CTAs fit, and stay there. As it is
  // a GPC with few SMs has no room left for one of attention's clusters of 8. Where those of a lone request then lie 5 and
  // 3 on the halves of the card they read at 5/6 of its speed: if they read for long they come when all have ended, 1 us
  // later.
  __device__ __forceinline__ bool lets_attention_in() const {
    const int pairs = c_.p.sequences.batch * c_.p.num_kv_heads;
    const bool leaves_sms_idle = 2 * kAttentionCluster * pairs <= c_.p.num_sms;
    return c_.p.pdl && (!leaves_sms_idle || pairs * (c_.row.keep << c_.k.page_log2) <= kMostEarlyTokens);
  }

  // Every head of a sequence keeps as many pages, the last one always.
  __device__ __forceinline__ void put_length() const {
    if (c_.head == 0 && c_.rank == 0 && threadIdx.x == 0)
      c_.p.selected_seqlens[c_.sequence] = c_.row.length - (c_.row.count - c_.row.keep) * c_.p.page_size;
  }

  static constexpr int kStratum = stratum_pages(kCentroids);
  static constexpr int kAttentionCluster = 8;
  static constexpr int kMostEarlyTokens = 1 << 17;  // of a KV head each

  TilesContext c_;
};

constexpr int tiles_warps(int centroids, Work work) {
  const int stratum = stratum_pages(centroids);
  return work == Work::kScore ? kScoringWarps : stratum / kOctet + stratum / 32;
}

// Where it chooses, 16 warps that score an SM.
template <int kCentroids, Work kWork, bool kPlain>
__global__ void __launch_bounds__(32 * tiles_warps(kCentroids, kWork), kWork == Work::kScore ? 1 : kCentroids / 4)
    tiles_kernel(const __grid_constant__ TilesKernelParams params) {
  extern __shared__ __align__(16) char shared[];
  TilesCta<kCentroids, kWork, kPlain>(params, shared).run();
}

}  // namespace bicl::sparse
