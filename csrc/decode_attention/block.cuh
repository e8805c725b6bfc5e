// What one warp does with 32 keys of a block in shared memory, transposed: S^T = K Q^T and O^T = V^T P^T by
// mma.m16n8k16 with keys (then dims) as M and query heads as N = 8. Half the instructions and accumulators of
// padding the heads to 16 rows.
//
// fp8: ldmatrix moves pairs of bytes. K's four bytes a thread are four neighbouring dims, so Q's fragments are
// laid out with the dims permuted likewise; V's pairs are two dims of one key, so dims 2g and 2g + 1 become
// rows g and g + 8 of the product. Both permutations cost nothing.
#pragma once

#include "traits.cuh"

namespace bicl::decode {

// --- fp8 to fp16 ----------------------------------------------------------------------------------
// Bytes (0, 1) and (2, 3) of `r` as pairs.
__device__ __forceinline__ void widen(uint32_t r, uint32_t& low, uint32_t& high, __nv_fp8_e4m3) {
#if __CUDA_ARCH__ >= 890
  asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.rn.f16x2.e4m3x2 %0, a;\ncvt.rn.f16x2.e4m3x2 %1, b;\n}"
      : "=r"(low), "=r"(high)
      : "r"(r));
#else
  // Exponent and mantissa to their fp16 places; the biases differ by 8. (NaN becomes 480.)
  const auto place = [](uint32_t bytes) {
    const uint32_t bits = (bytes & 0x80008000u) | ((bytes & 0x7f007f00u) >> 1);
    const __half2 v = __hmul2(*reinterpret_cast<const __half2*>(&bits), __float2half2_rn(256.f));
    return *reinterpret_cast<const uint32_t*>(&v);
  };
  low = place(__byte_perm(r, 0, 0x1404));
  high = place(__byte_perm(r, 0, 0x3424));
#endif
}
__device__ __forceinline__ void widen(uint32_t r, uint32_t& low, uint32_t& high, __nv_fp8_e5m2) {
  low = __byte_perm(r, 0, 0x1404);
  high = __byte_perm(r, 0, 0x3424);
}
// Bytes (0, 2) and (1, 3) of `r` as pairs.
__device__ __forceinline__ void widen_alternate(uint32_t r, uint32_t& even, uint32_t& odd, __nv_fp8_e4m3 type) {
  widen(__byte_perm(r, 0, 0x3120), even, odd, type);
}
__device__ __forceinline__ void widen_alternate(uint32_t r, uint32_t& even, uint32_t& odd, __nv_fp8_e5m2) {
  even = __byte_perm(r, 0, 0x2404);
  odd = __byte_perm(r, 0, 0x3414);
}

// --- where a warp's keys lie in a stage -------------------------------------------------------------
// Uniform across the warp but for the two lane offsets.
template <typename T>
struct StageView {
  uint32_t keys;         // byte offset of the warp's first K row from the stage
  uint32_t values;       // the same for V
  int pair_stride;       // from one pair of dim tiles to the next
  int last_tile;         // of an odd count of dim tiles, the last one's offset
  uint32_t lane;         // ldmatrix row and chunk of this lane, swizzled
  uint32_t lane_trans;   // the same for the transposing form

  __device__ StageView(int half, int lane_id, int page_size) {
    constexpr int kPlane = kBlockKeys * T::kHeadDim * T::kBytes;  // bytes of K in a stage
    if (T::kTile == kBlockKeys) {
      keys = half * kWarpKeys * T::kRowBytes;
      values = keys + kPlane;
      pair_stride = 2 * T::kTileBytes;
      last_tile = (T::kDimTiles - 1) * T::kTileBytes;
    } else if (page_size == kBlockKeys) {  // two token tiles a page, in Z-order
      keys = half * 2 * T::kTileBytes;
      values = keys + kPlane;
      pair_stride = 4 * T::kTileBytes;
      last_tile = (T::kDimTiles - 1) / 2 * pair_stride - half * T::kTileBytes;
    } else {  // two pages
      keys = half * kPlane;
      values = keys + kPlane / 2;
      pair_stride = 2 * T::kTileBytes;
      last_tile = (T::kDimTiles - 1) * T::kTileBytes;
    }
    const int row = lane_id & 15;
    lane = row * T::kRowBytes + swizzle_chunk(row, lane_id >> 4, T::kRowBytes) * kChunkBytes;
    if (T::kFp8) {
      lane_trans = lane;
    } else {
      const int key = (lane_id & 7) + ((lane_id >> 4) << 3);
      lane_trans = key * T::kRowBytes + swizzle_chunk(key, (lane_id >> 3) & 1, T::kRowBytes) * kChunkBytes;
    }
  }

  // Offset of the dim tile that holds 16-byte chunk `chunk` of a row.
  __device__ __forceinline__ int tile(int chunk) const {
    const int d = chunk / (T::kRowBytes / kChunkBytes);
    if (T::kDimTiles % 2 == 1 && d == T::kDimTiles - 1) return last_tile;
    return (d >> 1) * pair_stride + (d & 1) * T::kTileBytes;
  }

  // ldmatrix address of rows row .. row + 15, chunks chunk, chunk + 1 (chunk even).
  __device__ __forceinline__ uint32_t address(uint32_t base, uint32_t lane_offset, int row, int chunk) const {
    constexpr int kMask = T::kRowBytes / kChunkBytes - 1;
    return base + tile(chunk) + row * T::kRowBytes + (lane_offset ^ ((chunk & kMask) * kChunkBytes));
  }
};

// --- the warp's running state -----------------------------------------------------------------------
template <typename T>
struct WarpState {
  static constexpr int kSteps = T::kHeadDim / 16;
  float out[kSteps][T::kHeadBlocks][4];  // O^T: dims by heads
  float maximum[T::kHeadBlocks][2];      // of heads 2t and 2t + 1, log2 units
  float sum[T::kHeadBlocks][2];          // this thread's share

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int n = 0; n < T::kHeadBlocks; ++n) {
#pragma unroll
      for (int d = 0; d < kSteps; ++d)
#pragma unroll
        for (int i = 0; i < 4; ++i) out[d][n][i] = 0.f;
      maximum[n][0] = maximum[n][1] = kLowest;
      sum[n][0] = sum[n][1] = 0.f;
    }
  }
};

// The query as B operands of mma, in registers or in shared memory.
template <typename T>
struct Query {
  static constexpr int kSteps = T::kHeadDim / 16;
  uint2 fragments[T::kQueryShared ? 1 : T::kHeadBlocks * kSteps];
  const uint16_t* rows;  // [head][kQueryStride], already at this lane

  __device__ __forceinline__ void set(const char* slot, int lane) {
    rows = reinterpret_cast<const uint16_t*>(slot) + lane / 4 * T::kQueryStride + lane % 4 * (T::kFp8 ? 4 : 2);
    if (T::kQueryShared) return;
#pragma unroll
    for (int i = 0; i < T::kHeadBlocks * kSteps; ++i) fragments[i] = read(i / kSteps, i % kSteps);
  }

  __device__ __forceinline__ void get(uint32_t (&b)[2], int n, int k) const {
    const uint2 pair = T::kQueryShared ? read(n, k) : fragments[T::kQueryShared ? 0 : n * kSteps + k];
    b[0] = pair.x, b[1] = pair.y;
  }

 private:
  __device__ __forceinline__ uint2 read(int n, int k) const {
    const uint16_t* at = rows + 8 * n * T::kQueryStride + 16 * k;
    if (T::kFp8) return *reinterpret_cast<const uint2*>(at);
    return make_uint2(*reinterpret_cast<const uint32_t*>(at), *reinterpret_cast<const uint32_t*>(at + 8));
  }
};

// S^T of 32 keys: score[m][n] holds keys 16m + (g, g + 8) by heads 8n + (2t, 2t + 1).
template <typename T>
__device__ __forceinline__ void scores(float (&score)[2][T::kHeadBlocks][4], const Query<T>& query,
                                       const StageView<T>& view, uint32_t keys) {
  using Compute = typename T::Compute;
  constexpr int kSteps = T::kHeadDim / 16;
  // Two accumulators a tile halve the chain of dependent mma where registers allow.
  constexpr int kChains = T::kHeadBlocks == 1 && T::kConsumerWarps == 4 ? 2 : 1;
  float c[kChains][2][T::kHeadBlocks][4] = {};
  if constexpr (T::kFp8) {
#pragma unroll
    for (int k = 0; k < kSteps; k += 2)
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        uint32_t r[4], a[2][4];
        ptx::ldmatrix_x4(r, view.address(keys, view.lane, 16 * m, k));
#pragma unroll
        for (int i = 0; i < 4; ++i) widen(r[i], a[i / 2][i % 2], a[i / 2][2 + i % 2], typename T::Stored{});
#pragma unroll
        for (int n = 0; n < T::kHeadBlocks; ++n) {
          uint32_t b[2][2];
          query.get(b[0], n, k);
          query.get(b[1], n, k + 1);
          ptx::mma_16816(c[0][m][n], a[0], b[0], Compute{});
          ptx::mma_16816(c[kChains - 1][m][n], a[1], b[1], Compute{});
        }
      }
  } else {
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        uint32_t a[4];
        ptx::ldmatrix_x4(a, view.address(keys, view.lane, 16 * m, 2 * k));
#pragma unroll
        for (int n = 0; n < T::kHeadBlocks; ++n) {
          uint32_t b[2];
          query.get(b, n, k);
          ptx::mma_16816(c[k % kChains][m][n], a, b, Compute{});
        }
      }
  }
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int n = 0; n < T::kHeadBlocks; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        score[m][n][i] = kChains == 2 ? c[0][m][n][i] + c[kChains - 1][m][n][i] : c[0][m][n][i];
}

// Scaled scores in log2 units.
template <typename T>
__device__ __forceinline__ void scale_scores(float (&score)[2][T::kHeadBlocks][4], float scale, float softcap) {
  const float factor = softcap > 0.f ? scale / softcap * (2.f * kLog2e) : scale * kLog2e;
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int n = 0; n < T::kHeadBlocks; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) score[m][n][i] *= factor;
  if (softcap <= 0.f) return;
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int n = 0; n < T::kHeadBlocks; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // c tanh(s / c) = c (1 - 2 / (1 + exp(2 s / c)))
        float& s = score[m][n][i];
        s = softcap * kLog2e * (1.f - __fdividef(2.f, 1.f + ptx::exp2_approx(fminf(s, 80.f))));
      }
}

// Hides keys outside [low, high), counted from the warp's first key.
template <typename T>
__device__ __forceinline__ void mask_scores(float (&score)[2][T::kHeadBlocks][4], int low, int high, int lane) {
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = 16 * m + lane / 4 + (i / 2) * 8;
      if (key < low || key >= high)
#pragma unroll
        for (int n = 0; n < T::kHeadBlocks; ++n) score[m][n][i] = -INFINITY;
    }
}

// Zeroes V rows outside [low, high): what lies there is not ours, and 0 x NaN is NaN.
template <typename T>
__device__ __forceinline__ void clear_values(const StageView<T>& view, uint32_t values, int low, int high,
                                             int lane) {
  if (lane < low || lane >= high) {
    const int row_chunks = T::kRowBytes / kChunkBytes;
    for (int chunk = 0; chunk < T::kDimTiles * row_chunks; ++chunk) {
      const uint32_t address =
          values + view.tile(chunk) + lane * T::kRowBytes + (chunk % row_chunks) * kChunkBytes;
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
    }
  }
  __syncwarp();
}

// Online softmax: new maximum, old output rescaled if it moved, scores become weights.
template <typename T>
__device__ __forceinline__ void softmax_step(float (&score)[2][T::kHeadBlocks][4], WarpState<T>& state) {
  float previous[T::kHeadBlocks][2];
  bool moved = false;
#pragma unroll
  for (int n = 0; n < T::kHeadBlocks; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float m = fmaxf(fmaxf(score[0][n][j], score[0][n][j + 2]), fmaxf(score[1][n][j], score[1][n][j + 2]));
      m = fmaxf(m, __shfl_xor_sync(~0u, m, 4));
      m = fmaxf(m, __shfl_xor_sync(~0u, m, 8));
      m = fmaxf(m, __shfl_xor_sync(~0u, m, 16));
      previous[n][j] = state.maximum[n][j];
      state.maximum[n][j] = fmaxf(previous[n][j], m);
      moved |= state.maximum[n][j] != previous[n][j];
    }
  if (__any_sync(~0u, moved)) {
#pragma unroll
    for (int n = 0; n < T::kHeadBlocks; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float factor = ptx::exp2_approx(previous[n][j] - state.maximum[n][j]);
        state.sum[n][j] *= factor;
#pragma unroll
        for (int d = 0; d < WarpState<T>::kSteps; ++d) {
          state.out[d][n][j] *= factor;
          state.out[d][n][j + 2] *= factor;
        }
      }
  }
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int n = 0; n < T::kHeadBlocks; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        score[m][n][i] = ptx::exp2_approx(score[m][n][i] - state.maximum[n][i % 2]);
        state.sum[n][i % 2] += score[m][n][i];
      }
}

// O^T += V^T P^T.
template <typename T>
__device__ __forceinline__ void accumulate(const float (&weight)[2][T::kHeadBlocks][4], WarpState<T>& state,
                                           const StageView<T>& view, uint32_t values) {
  using Compute = typename T::Compute;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    uint32_t b[T::kHeadBlocks][2];
#pragma unroll
    for (int n = 0; n < T::kHeadBlocks; ++n) {
      b[n][0] = ptx::movmatrix_trans(ptx::pack(weight[m][n][0], weight[m][n][1], Compute{}));
      b[n][1] = ptx::movmatrix_trans(ptx::pack(weight[m][n][2], weight[m][n][3], Compute{}));
    }
    if constexpr (T::kFp8) {
#pragma unroll
      for (int d = 0; d < WarpState<T>::kSteps; d += 2) {
        uint32_t r[4], a[2][4];
        ptx::ldmatrix_x4_trans(r, view.address(values, view.lane_trans, 16 * m, d));
#pragma unroll
        for (int i = 0; i < 4; ++i)
          widen_alternate(r[i], a[i / 2][2 * (i % 2)], a[i / 2][2 * (i % 2) + 1], typename T::Stored{});
#pragma unroll
        for (int n = 0; n < T::kHeadBlocks; ++n) {
          ptx::mma_16816(state.out[d][n], a[0], b[n], Compute{});
          ptx::mma_16816(state.out[d + 1][n], a[1], b[n], Compute{});
        }
      }
    } else {
#pragma unroll
      for (int d = 0; d < WarpState<T>::kSteps; ++d) {
        uint32_t a[4];
        ptx::ldmatrix_x4_trans(a, view.address(values, view.lane_trans, 16 * m, 2 * d));
#pragma unroll
        for (int n = 0; n < T::kHeadBlocks; ++n) ptx::mma_16816(state.out[d][n], a, b[n], Compute{});
      }
    }
  }
}

}  // namespace bicl::decode
