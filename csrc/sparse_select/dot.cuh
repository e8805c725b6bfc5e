// Products of 4-bit rows in global memory with a few query vectors, by mma.m16n8k32 straight from registers.
//
// The order of a product's terms is free, so each thread of a quad takes 16-byte pieces of a row as they come: a word of
// piece 4 j + t holds the thread's part of one mma. The queries are cut alike: no shared-memory transpose on either
// side. A word's bytes, low + 16 high, are one half of k as they are, and masked to their low nibbles the other: with
// q of the high nibble against the first and 16 q of the low one - q of the high one against the second, the sum is 16
// times the product. Everything is exact: a query is an integer of 15 bits in two columns, 128 times the first and the
// second.
#pragma once

#include "../common/numeric.cuh"
#include "../common/ptx.cuh"

namespace bicl::sparse {

constexpr int kPieceBytes = 16;  // of a row: 32 elements
constexpr int kQueryStep = 128;  // of a query's first column
constexpr int kQueryMost = 127 * kQueryStep / 17;  // 16 q - q of another dim must fit

// One thread's pieces of the centroids of 8 pages, of page g = lane / 4: 128 elements a row.
template <int kCentroids>
struct PagePieces {
  uint4 at[kCentroids];
};

// rows: the page's first one for this head, in global or in shared memory, or null: zeros. Pieces 4 step to 4 step + 3 of
// each row.
template <bool kGlobal, int kCentroids, typename Byte>
__device__ __forceinline__ void load_pieces(PagePieces<kCentroids>& pieces, const Byte* rows, int row_bytes, int step,
                                            int lane) {
  const int offset = (4 * step + lane % 4) * kPieceBytes;
#pragma unroll
  for (int c = 0; c < kCentroids; ++c) {
    const auto* piece = reinterpret_cast<const uint4*>(rows + c * row_bytes + offset);
    pieces.at[c] = (kGlobal && rows == nullptr) || offset >= row_bytes ? make_uint4(0, 0, 0, 0)
                   : kGlobal                                          ? ptx::load_row(piece)
                                                                      : *piece;
  }
}

// acc[i]: centroids (2 i, 2 i + 1) of page g by vectors (2 t, 2 t + 1). vectors: shared, [word / 2][lane], words 2 w and
// 2 w + 1 of the step.
template <int kCentroids>
__device__ __forceinline__ void multiply(int (&acc)[kCentroids / 2][4], const PagePieces<kCentroids>& pieces,
                                         const uint4* vectors, int lane) {
  constexpr uint32_t kLow = 0x0f0f0f0fu;
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    const uint4 b = vectors[pair * 32 + lane];
#pragma unroll
    for (int i = 0; i < kCentroids / 2; ++i) {
      const uint4 u = pieces.at[2 * i], l = pieces.at[2 * i + 1];
      const uint32_t upper[2] = {pair ? u.z : u.x, pair ? u.w : u.y};
      const uint32_t lower[2] = {pair ? l.z : l.x, pair ? l.w : l.y};
#pragma unroll
      for (int word = 0; word < 2; ++word)
        ptx::mma_16832(acc[i],
                       {upper[word] & kLow, lower[word] & kLow, upper[word], lower[word]},
                       {word ? b.z : b.x, word ? b.w : b.y});
    }
  }
}

}  // namespace bicl::sparse
