// Ampere and Ada: the producer warp copies 16 bytes a thread with cp.async into the same ring.
#pragma once

#include "../block_source.cuh"

namespace bicl::decode {

struct Sm80Loader {
  static constexpr int kFullArrivals = 32;
  static constexpr bool kClusters = false;
  static constexpr bool kLaneCopies = false;

  template <typename T>
  __device__ __forceinline__ void load(const BlockSource& block, int turn, int lane, const Pages& pages,
                                       uint32_t stage, uint32_t full, uint32_t empty, uint32_t parity) {
    const int rows = __shfl_sync(~0u, block.rows, turn);
    const int head = __shfl_sync(~0u, block.head, turn);
    ptx::mbarrier_wait(empty, parity);
    const int pages_in_block = kBlockKeys / pages.page_size;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (i == pages_in_block || i * pages.page_size >= rows) break;
      const char* source = head_page(pages, __shfl_sync(~0u, block.page[i], turn), head);
      copy_page<T>(stage + i * head_page_bytes(pages), source, min(rows - i * pages.page_size, pages.page_size),
                   pages, lane);
    }
    ptx::cp_async_arrive(full);
    __syncwarp();
  }

 private:
  template <typename T>
  __device__ __forceinline__ void copy_page(uint32_t target, const char* source, int rows, const Pages& pages,
                                            int lane) {
    const int bytes = head_page_bytes(pages);
    if (rows == pages.page_size) {
#pragma unroll 8
      for (int i = lane * kChunkBytes; i < bytes; i += 32 * kChunkBytes) ptx::cp_async_16(target + i, source + i);
      return;
    }
#pragma unroll 1
    for (int i = lane * kChunkBytes; i < bytes; i += 32 * kChunkBytes)
      if (token_of<T>(i, pages) < rows) ptx::cp_async_16(target + i, source + i);
  }

  // The token a byte of a head-page belongs to: z_order() backwards.
  template <typename T>
  __device__ __forceinline__ static int token_of(int offset, const Pages& pages) {
    const int inside = offset % plane_bytes(pages);
    const int row = inside % T::kTileBytes / T::kRowBytes;
    if (pages.page_size == T::kTile) return row;
    const int order = inside / T::kTileBytes;
    const bool alone = order / 4 * 2 + 1 == T::kDimTiles;
    return (alone ? order & 3 : (order >> 1) & 1) * T::kTile + row;
  }
};

}  // namespace bicl::decode
