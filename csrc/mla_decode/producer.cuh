// The warp that copies pages into the ring.
#pragma once

#include "cta.cuh"

namespace bicl::mla {

template <typename T>
class Producer : protected Cta<T> {
 protected:
  using Base = Cta<T>;
  using typename Base::Cursor;
  using Base::entries_;
  using Base::p_;
  using Base::empty;
  using Base::full;
  using Base::stage;
  using Base::team;
  using Base::Base;

  __device__ __forceinline__ void init_barriers() const {
#pragma unroll 1
    for (int i = 0; i < T::kStages; ++i) {
      ptx::mbarrier_init(full(i), 1);
      ptx::mbarrier_init(empty(i), kConsumers / 32 * ptx::kWarpArrivals);
    }
    ptx::fence_barrier_init();
  }

  struct Source {
    int page = 0, keys = 0;
  };

  __device__ __forceinline__ Source source(int tile, int end) const {
    if (tile >= end) return {};
    const int sequence = entries_.sequence_of(tile);
    const int64_t entry = sequence * p_.sequences.page_table_stride + tile - entries_.first_tile(sequence);
    return {p_.sequences.page_table[entry], entries_.keys(sequence, tile)};
  }

  // Asks for the start of the page list that this CTA reads if lengths are even, while the lengths are on their way.
  __device__ __forceinline__ void touch_table(int lane) const {
    constexpr int kLine = 128 / sizeof(int32_t);
    const int sequence = team() * p_.sequences.batch / gridDim.y;
    if (lane * kLine >= p_.table_columns) return;
    int32_t unused;
    asm volatile("ld.global.s32 %0, [%1];"
                 : "=r"(unused)
                 : "l"(p_.sequences.page_table + sequence * p_.sequences.page_table_stride + lane * kLine));
  }

  __device__ __forceinline__ void produce(int begin, int end, int lane) const {
    const uint64_t policy = ptx::evict_first_policy();
    Cursor cursor{0, 1};  // the first round finds its stages empty
    Source next = source(begin + lane, end);
#pragma unroll 1
    for (int x = begin; x < end; x += 32) {
      const Source own = next;
      const int count = min(32, end - x);
#pragma unroll 1
      for (int turn = 0; turn < count; ++turn) {
        const int page = __shfl_sync(~0u, own.page, turn), keys = __shfl_sync(~0u, own.keys, turn);
        if (lane == 0) copy_page(cursor, page, keys, policy);
#pragma unroll
        for (int i = 0; i < kStagesPage; ++i) cursor.advance();
        if (turn == min(2, count - 1)) next = source(x + 32 + lane, end);
      }
    }
  }

  __device__ __forceinline__ void copy_page(Cursor cursor, int page, int keys, uint64_t policy) const {
    const char* data = static_cast<const char*>(p_.pages) + static_cast<int64_t>(page) * (kDimTiles * kTileBytes);
#pragma unroll 1
    for (int part = 0; part < kStagesPage; ++part, data += kStageBytes) {
      ptx::mbarrier_wait(empty(cursor.stage), cursor.parity);
      if (keys == kTileKeys) {
        ptx::mbarrier_expect_tx(full(cursor.stage), kStageBytes);
        ptx::bulk_copy(stage(cursor.stage), data, kStageBytes, full(cursor.stage), policy);
      } else {
        ptx::mbarrier_expect_tx(full(cursor.stage), kStageTiles * keys * 128);
#pragma unroll 1
        for (int tile = 0; tile < kStageTiles; ++tile)
          ptx::bulk_copy(stage(cursor.stage) + tile * kTileBytes, data + tile * kTileBytes, keys * 128,
                         full(cursor.stage), policy);
      }
      cursor.advance();
    }
  }
};

}  // namespace bicl::mla
