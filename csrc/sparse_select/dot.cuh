// Products of 16-bit rows in global memory with a few query vectors, by mma.m16n8k16 straight from registers.
//
// The order of a product's terms is free, so each thread of a quad takes 16-byte pieces of a row as they come: piece
// 4 j + t holds the k of two mma. The queries are cut alike: no shared-memory transpose on either side.
#pragma once

#include "../common/numeric.cuh"
#include "../common/ptx.cuh"

namespace bicl::sparse {

constexpr int kRows = 16;        // rows a warp multiplies at once
constexpr int kPieceElements = 8;  // of 16 bits
constexpr int kStep = 8;         // pieces of a row that a thread holds at once: 256 elements a row

// One thread's pieces of rows g and g + 8 of 16, and of the query vectors.
struct RowPieces {
  uint4 upper[kStep], lower[kStep];
};

__device__ __forceinline__ uint4 load_piece(const uint16_t* row, int piece, int pieces) {
  if (row == nullptr || piece >= pieces) return make_uint4(0, 0, 0, 0);
  return ptx::load_row(reinterpret_cast<const uint4*>(row) + piece);
}

// The lane's pieces of rows `upper` (g) and `lower` (g + 8), from piece `first` on; null rows are zeros.
__device__ __forceinline__ void load_rows(RowPieces& rows, const uint16_t* upper, const uint16_t* lower, int first,
                                          int pieces, int lane) {
#pragma unroll
  for (int j = 0; j < kStep; ++j) {
    rows.upper[j] = load_piece(upper, first + 4 * j + lane % 4, pieces);
    rows.lower[j] = load_piece(lower, first + 4 * j + lane % 4, pieces);
  }
}

// acc[n]: rows (g, g + 8) by vectors 8 n + (2 t, 2 t + 1). vectors: shared, [n][piece / 4][lane], stride in uint4.
template <typename T, int kBlocks>
__device__ __forceinline__ void multiply(float (&acc)[kBlocks][4], const RowPieces& rows, const uint4* vectors,
                                         int block_stride, int steps, int lane) {
#pragma unroll
  for (int j = 0; j < kStep; ++j) {
    if (j >= steps) break;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      const uint4 b = vectors[n * block_stride + j * 32 + lane];
      const uint4 u = rows.upper[j], l = rows.lower[j];
      ptx::mma_16816(acc[n], {u.x, l.x, u.y, l.y}, {b.x, b.y}, T{});
      ptx::mma_16816(acc[n], {u.z, l.z, u.w, l.w}, {b.z, b.w}, T{});
    }
  }
}

}  // namespace bicl::sparse
