// Products of e4m3 rows in global memory with a few query vectors, by mma.m16n8k16 straight from registers.
//
// The order of a product's terms is free, so each thread of a quad takes 16-byte pieces of a row as they come: piece
// 4 j + t holds the k of four mma. The queries are cut alike: no shared-memory transpose on either side. e4m3 is
// widened to fp16 on the way (exact).
#pragma once

#include "../common/numeric.cuh"
#include "../common/ptx.cuh"

namespace bicl::sparse {

constexpr int kPieceBytes = 16;  // of a row: as many elements
constexpr int kSteps = 2;        // pieces of a row that a thread holds at once: 128 elements a row

// One thread's pieces of the centroids of 8 pages, of page g = lane / 4.
template <int kCentroids>
struct PagePieces {
  uint4 at[kCentroids][kSteps];
};

// rows: the page's first one for this head, or null: zeros. From step `first` on.
template <int kCentroids>
__device__ __forceinline__ void load_pieces(PagePieces<kCentroids>& pieces, const uint8_t* rows, int row_bytes,
                                            int first, int lane) {
#pragma unroll
  for (int c = 0; c < kCentroids; ++c)
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      const int offset = (4 * (first + j) + lane % 4) * kPieceBytes;
      pieces.at[c][j] = rows == nullptr || offset >= row_bytes
                            ? make_uint4(0, 0, 0, 0)
                            : ptx::load_row(reinterpret_cast<const uint4*>(rows + c * row_bytes + offset));
    }
}

// Two e4m3 of a word's low or high half.
__device__ __forceinline__ uint32_t widen(uint32_t word, bool high) {
  const __half2_raw wide =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(high ? word >> 16 : word), __NV_E4M3);
  return *reinterpret_cast<const uint32_t*>(&wide);
}

// acc[i]: centroids (2 i, 2 i + 1) of page g by vectors (2 t, 2 t + 1). vectors: shared, fp16, [step][half of a
// piece][lane], from the step on that the pieces begin with.
template <int kCentroids>
__device__ __forceinline__ void multiply(float (&acc)[kCentroids / 2][4], const PagePieces<kCentroids>& pieces,
                                         const uint4* vectors, int steps, int lane) {
#pragma unroll
  for (int j = 0; j < kSteps; ++j) {
    if (j >= steps) break;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 b = vectors[(2 * j + half) * 32 + lane];
#pragma unroll
      for (int i = 0; i < kCentroids / 2; ++i) {
        const uint4 u = pieces.at[2 * i][j], l = pieces.at[2 * i + 1][j];
        const uint32_t upper[2] = {half ? u.z : u.x, half ? u.w : u.y};
        const uint32_t lower[2] = {half ? l.z : l.x, half ? l.w : l.y};
#pragma unroll
        for (int word = 0; word < 2; ++word)
          ptx::mma_16816(acc[i],
                         {widen(upper[word], false), widen(lower[word], false), widen(upper[word], true),
                          widen(lower[word], true)},
                         {word ? b.z : b.x, word ? b.w : b.y}, __half{});
      }
    }
  }
}

}  // namespace bicl::sparse
