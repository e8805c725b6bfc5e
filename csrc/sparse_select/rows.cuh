// The index's rows of an octet of pages on their way to a warp. On Hopper by the copy engine, some octets ahead, through a
// ring in shared memory: a (page, head) is one contiguous piece. Elsewhere straight into registers.
#pragma once

#include "dot.cuh"
#include "tiles_cta.cuh"

namespace bicl::sparse {

template <int kCentroids>
class RowRing {
 public:
  __device__ __forceinline__ explicit RowRing(const TilesContext& c)
      : c_(c), bytes_(kCentroids * c.p.index.row_bytes), ring_(c.shared.ring + c.warp * c.k.ring_bytes()) {}

#if __CUDA_ARCH__ >= 900
  __device__ __forceinline__ int ahead() const { return 1 << c_.k.stages_log2; }

  __device__ __forceinline__ void start() const {
    if (c_.lane < ahead()) {
      ptx::mbarrier_init(barrier(c_.lane), 1);
      ptx::fence_barrier_init();
    }
    __syncwarp();
  }

  // id: of page i in lane i < 8, -1 where there is none. The turn `ahead()` earlier must have been loaded.
  __device__ __forceinline__ void ask(int turn, int32_t id) const {
    const bool is_there = c_.lane < kOctet && id >= 0;
    const int count = __popc(__ballot_sync(~0u, is_there));
    const auto done = barrier(turn);
    if (c_.lane == 0) ptx::mbarrier_expect_tx(done, count * bytes_);
    __syncwarp();
    if (!is_there) return;
    const uint8_t* source = c_.p.index.records + id * c_.p.index.record_bytes + c_.head * bytes_;
    ptx::bulk_copy(ptx::smem_address(page(turn, c_.lane)), source, bytes_, done, ptx::evict_first_policy());
  }

  __device__ __forceinline__ void wait(int turn) const {
    ptx::mbarrier_wait(barrier(turn), turn >> c_.k.stages_log2 & 1);
  }

  // Of page lane / 4. What belongs to no page means nothing.
  __device__ __forceinline__ void load(PagePieces<kCentroids>& pieces, int turn, int step, const uint8_t*) const {
    load_pieces<false>(pieces, page(turn, c_.lane / 4), c_.p.index.row_bytes, step, c_.lane);
  }

 private:
  __device__ __forceinline__ int stage(int turn) const { return turn & (ahead() - 1); }
  __device__ __forceinline__ char* page(int turn, int place) const {
    return ring_ + (stage(turn) * kOctet + place) * c_.k.page_stride;
  }
  __device__ __forceinline__ auto barrier(int turn) const {
    return ptx::smem_address(c_.shared.barriers + c_.warp * kMaxStages + stage(turn));
  }
#else
  __device__ __forceinline__ int ahead() const { return 0; }
  __device__ __forceinline__ void start() const {}
  __device__ __forceinline__ void ask(int, int32_t) const {}
  __device__ __forceinline__ void wait(int) const {}
  __device__ __forceinline__ void load(PagePieces<kCentroids>& pieces, int, int step, const uint8_t* record) const {
    const uint8_t* rows = record == nullptr ? nullptr : record + c_.head * bytes_;
    load_pieces<true>(pieces, rows, c_.p.index.row_bytes, step, c_.lane);
  }

 private:
#endif
  const TilesContext& c_;
  const int bytes_;  // of a page and head
  char* const ring_;
};

}  // namespace bicl::sparse
