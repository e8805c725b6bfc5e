// Hopper: one thread a block, plain bulk copies, no tensor map. A head-page as stored is what ldmatrix wants,
// so a full one is a single copy.
#pragma once

#include "../block_source.cuh"

namespace bicl::decode {

struct Sm90Loader {
  static constexpr int kFullArrivals = 1;
  static constexpr bool kClusters = true;
  static constexpr bool kLaneCopies = true;  // copy_whole()

  uint64_t policy;

  __device__ Sm90Loader() : policy(ptx::evict_first_policy()) {}

  // Called by the whole warp; the block is lane `turn`'s.
  template <typename T>
  __device__ __forceinline__ void load(const BlockSource& block, int turn, int lane, const Pages& pages,
                                       uint32_t stage, uint32_t full, uint32_t empty, uint32_t parity) {
    if (lane == turn) {
      ptx::mbarrier_wait(empty, parity);
      if (block.rows == 0) {
        ptx::mbarrier_arrive(full);
      } else {
        ptx::mbarrier_expect_tx(full, block.rows * 2 * T::kHeadDim * T::kBytes);
        const int first_rows = min(block.rows, pages.page_size);
        copy_page<T>(stage, head_page(pages, block.page[0], block.head), first_rows, pages, full);
        if (block.rows > first_rows)
          copy_page<T>(stage + head_page_bytes(pages), head_page(pages, block.page[1], block.head),
                       block.rows - first_rows, pages, full);
      }
    }
    __syncwarp();  // in order: a later turn must not see an earlier phase of the same stage
  }

  // A page of 64 tokens into an empty stage, by one thread.
  template <typename T>
  __device__ __forceinline__ void copy_whole(const BlockSource& block, const Pages& pages, uint32_t stage,
                                             uint32_t full) const {
    const int64_t index = static_cast<int64_t>(block.page[0]) * pages.num_kv_heads + block.head;
    ptx::mbarrier_expect_tx(full, T::kStageBytes);
    ptx::bulk_copy(stage, static_cast<const char*>(pages.data) + index * T::kStageBytes, T::kStageBytes, full, policy);
  }

 private:
  // The first rows of each tile are a prefix of it, so a partial page costs one copy a tile.
  template <typename T>
  __device__ __forceinline__ void copy_page(uint32_t target, const char* source, int rows, const Pages& pages,
                                            uint32_t full) {
    if (rows == pages.page_size) {
      ptx::bulk_copy(target, source, head_page_bytes(pages), full, policy);
      return;
    }
    const int token_tiles = pages.page_size / T::kTile;
#pragma unroll 1
    for (int plane = 0; plane < 2; ++plane)
#pragma unroll 1
      for (int t = 0; t < token_tiles && t * T::kTile < rows; ++t)
#pragma unroll 1
        for (int d = 0; d < T::kDimTiles; ++d) {
          const int offset =
              plane * plane_bytes(pages) + z_order(t, d, token_tiles, T::kDimTiles) * T::kTileBytes;
          ptx::bulk_copy(target + offset, source + offset, min(rows - t * T::kTile, T::kTile) * T::kRowBytes,
                         full, policy);
        }
  }
};

}  // namespace bicl::decode
