// The way of a finished tile to memory: through the shared memory that its rows of Q took, a warp's 16 rows at a time,
// so that lanes write whole rows where their registers hold columns.
#pragma once

#include "pipeline.cuh"

namespace bicl::prefill::sm90 {

__device__ __forceinline__ void store_matrices(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}

// Normalises and stores the warp's rows. `stage` is where its warpgroup's Q lay, `thread` one of the 128.
template <typename E, int D>
__device__ __forceinline__ void store_rows_through(uint32_t stage, const PrefillParams& p, const Assignment& a,
                                                   int first_row, uint32_t thread, const float (&o)[D / 2],
                                                   const float (&inverse)[2]) {
  constexpr uint32_t kChunks = D / 8, kTileBytes = 64 * 128;
  const uint32_t lane = thread % 32, top = thread / 32 * 16;
  const uint32_t rows = stage + top * 128;
  // Lanes of an octet name the rows of one 8 x 8 matrix: rows 0 to 7, 8 to 15, then the same of the next 8 columns.
  const uint32_t corner = rows + lane % 16 * 128 + ((lane / 16 ^ lane) & 7) * 16;
#pragma unroll
  for (uint32_t n = 0; n < kChunks; n += 2) {
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float factor = inverse[i % 2];
      w[i] = ptx::pack(o[4 * n + 2 * i] * factor, o[4 * n + 2 * i + 1] * factor, E{});
    }
    store_matrices((corner ^ (n % 8 * 16)) + n / 8 * kTileBytes, w);
  }
  __syncwarp();
  E* out = static_cast<E*>(p.out) + a.tile.query_start * p.out_token_stride +
           a.head * static_cast<int64_t>(p.group.divisor) * p.out_head_stride;
#pragma unroll
  for (uint32_t j = 0; j < kChunks / 2; ++j) {
    const uint32_t row = (lane + 32 * j) / kChunks, chunk = (lane + 32 * j) % kChunks;
    const uint4 x = load_shared(rows + row * 128 + ((chunk ^ row) & 7) * 16 + chunk / 8 * kTileBytes);
    const RowPlace place = row_place(p, first_row + top + row);
    if (place.token < a.tile.query_len && chunk * 8 < static_cast<uint32_t>(p.head_dim))
      *reinterpret_cast<uint4*>(out + place.token * p.out_token_stride + place.head * p.out_head_stride + chunk * 8) = x;
  }
}

}  // namespace bicl::prefill::sm90
