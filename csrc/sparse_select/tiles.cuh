// Which pages a decode step reads: scores of all pages of a (sequence, KV head) against its queries, and the best.
//
//   score   each query head's of each page (score.cuh): a warp eight pages
//   pick    the best of each stratum (pick.cuh): another warp, while the others score the next
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
  using Shape = TilesShape<kCentroids, kWork>;
  using Context = TilesContext<Shape>;

 public:
  __device__ __forceinline__ TilesCta(const TilesKernelParams& k, char* shared) : c_(k, shared) {}

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
    const float sparsity = Shape::kChooses ? __fmul_rn(p.sparsity[c_.sequence], p.share) : 0.f;
    c_.row = tiles_row(tokens, sparsity, p.rule, c_.k.page_log2, p.max_pages, Shape::kStratum);
  }

  __device__ __forceinline__ void score_all() const {
    const int base = kOctet * (c_.rank * Shape::kScorers + c_.warp), step = kOctet * c_.splits() * Shape::kScorers;
    const auto page_at = [&](int octet, int place) {
      const int page = base + octet * step + place;
      return page < c_.row.end ? page : -1;
    };
    const int octets = max(0, c_.row.end - base + step - 1) / step;
    Scorer<kPlain, Context, decltype(page_at)> scorer(c_, octets, page_at);
    scorer.begin();
    scorer.prepare();
#pragma unroll 1
    for (int octet = 0; octet < octets; scorer.move_on(octet++))
      scorer.score(octet, [&](int query_head, int place, float score) {
        const int page = page_at(octet, place);
        if (query_head < c_.k.group && page >= 0)
          c_.p.scores[c_.row_offset() * c_.k.group + static_cast<int64_t>(query_head) * c_.p.max_pages + page] =
              score / kLog2e;
      });
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
    const bool picks = c_.picks();
    const int turns = (row.strata - c_.rank + c_.splits() - 1) / c_.splits();
    const auto page_at = [&](int octet, int place) {
      const int first = kOctet * octet + place;
      if (picks) return first < row.begin ? first : -1;
      const int turn = octet / Shape::kTurnOctets, part = octet % Shape::kTurnOctets;
      return row.page(c_.rank + turn * c_.splits(), kOctet * (c_.warp + Shape::kScorers * part) + place);
    };
    const int octets = picks ? (row.begin + kOctet - 1) / kOctet : turns * Shape::kTurnOctets;
    Scorer<kPlain, Context, decltype(page_at)> scorer(c_, octets, page_at);
    const Picker<Context> picker(c_);
    init_barriers();  // prepare() has everybody see them
    if (picks) picker.clear_firsts();
    scorer.begin();
    scorer.prepare();
#pragma unroll 1
    for (int octet = 0; octet < octets; ++octet) {
      const int turn = octet / Shape::kTurnOctets, part = c_.warp + octet % Shape::kTurnOctets * Shape::kScorers;
      if (!picks && part == c_.warp) ptx::mbarrier_wait(barrier(c_.shared.free, turn), (turn >> 1 & 1) ^ 1);
      const int pages = picks ? row.begin - kOctet * octet : row.size(c_.rank + turn * c_.splits()) - kOctet * part;
      scorer.score(octet, [&](int query_head, int place, float score) {
        const float own = place < pages ? score : -INFINITY;
        if (picks) picker.put_firsts(query_head, place, own);
        else picker.put(turn, part, query_head, place, own);
      });
      if (!picks && octet % Shape::kTurnOctets == Shape::kTurnOctets - 1) arrive(c_.shared.full, turn);
      scorer.move_on(octet);
    }
    if (c_.rank == 0) put_ends();
    if (!picks) return;
    __syncwarp();  // the first pages' sums are there
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
      const int stratum = c_.rank + turn * c_.splits(), before = row.begin + row.before(stratum);
      const auto candidates = picker.candidates(stratum);
      ptx::mbarrier_wait(barrier(c_.shared.full, turn), turn >> 1 & 1);
      if (turn == turns - 1 && lets_attention_in()) ptx::grid_launch_dependents();
      picker.pick(turn, candidates, row.quota(stratum),
                  [&](int own, int position, int32_t page) { put(before + own, position, page); });
      arrive(c_.shared.free, turn);
    }
  }

  __device__ __forceinline__ static uint32_t barrier(uint64_t* of, int number) {
    return ptx::smem_address(of + (number & 1));
  }
  // One arrival a warp.
  __device__ __forceinline__ void arrive(uint64_t* of, int number) const {
    __syncwarp();
    if (c_.lane == 0) ptx::mbarrier_arrive(barrier(of, number));
  }
  __device__ __forceinline__ void init_barriers() const {
    if (threadIdx.x >= 2) return;
    ptx::mbarrier_init(barrier(c_.shared.full, threadIdx.x), Shape::kScorers);
    ptx::mbarrier_init(barrier(c_.shared.free, threadIdx.x), 1);
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
  // 3 on the halves of the card they read at 5/6 of its speed: they come when all have ended.
  __device__ __forceinline__ bool lets_attention_in() const {
    return c_.p.pdl && 2 * kAttentionCluster * c_.p.sequences.batch * c_.p.num_kv_heads > c_.p.num_sms;
  }

  // Every head of a sequence keeps as many pages, the last one always.
  __device__ __forceinline__ void put_length() const {
    if (c_.head == 0 && c_.rank == 0 && threadIdx.x == 0)
      c_.p.selected_seqlens[c_.sequence] = c_.row.length - (c_.row.count - c_.row.keep) * c_.p.page_size;
  }

  static constexpr int kAttentionCluster = 8;

  Context c_;
};

template <int kCentroids, Work kWork, bool kPlain>
__global__ void __launch_bounds__(TilesShape<kCentroids, kWork>::kThreads, kWork == Work::kScore ? 1 : 2)
    tiles_kernel(const __grid_constant__ TilesKernelParams params) {
  extern __shared__ __align__(16) char shared[];
  TilesCta<kCentroids, kWork, kPlain>(params, shared).run();
}

}  // namespace bicl::sparse
