// What a thread knows about its two rows of a 16-row accumulator block, the same for mma.sync and wgmma:
// c[4 n + {0, 1}] are columns 8 n + 2 (lane % 4) + {0, 1} of row lane / 4, c[4 n + {2, 3}] of row lane / 4 + 8.
#pragma once

#include "../common/numeric.cuh"
#include "../common/ptx.cuh"
#include "params.h"

namespace bicl::prefill {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// Not volatile, so that it may be scheduled among the packing of earlier results.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// A row of a tile as (token, query head), and the keys it sees.
struct RowPlace {
  int token;  // within the sequence
  int head;   // within the group
};

__device__ __forceinline__ RowPlace row_place(const PrefillParams& p, int row) {
  uint32_t head;
  const uint32_t token = p.group.divide(row, head);
  return {static_cast<int>(token), static_cast<int>(head)};
}

struct RowKeys {
  int begin[2], end[2];  // visible keys of the thread's two rows

  __device__ __forceinline__ RowKeys(const PrefillParams& p, const PrefillTile& tile, int row) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int pos = row_place(p, row + 8 * i).token + tile.key_len - tile.query_len;
      begin[i] = p.window.begin(pos);
      end[i] = p.window.end(pos, tile.key_len);
    }
  }
};

// Keys of the whole tile: every row sees [all_begin, all_end), no row sees beyond [.., end).
struct TileKeys {
  int all_begin, all_end, end;

  __device__ __forceinline__ TileKeys(const PrefillParams& p, const PrefillTile& tile, int rows) {
    const int offset = tile.key_len - tile.query_len;
    const int first = row_place(p, tile.row).token + offset;
    const int last = min(row_place(p, tile.row + rows - 1).token, tile.query_len - 1) + offset;
    all_begin = p.window.begin(last);
    all_end = p.window.end(first, tile.key_len);
    end = p.window.end(last, tile.key_len);
  }
};

// Scores to the units of the exponent: capped scores are tanh(s * cap_scale), exponents score * log2_scale.
struct ScoreScale {
  float cap_scale;
  float log2_scale;

  __device__ __forceinline__ explicit ScoreScale(const PrefillParams& p) {
    const float scale = p.scale * p.pages.k_scale;
    cap_scale = p.softcap > 0.f ? scale / p.softcap : 0.f;
    log2_scale = (p.softcap > 0.f ? p.softcap : scale) * kLog2e;
  }
};

// tanh to float32 rounding: tanh.approx is off by 2^-11, which a cap of 50 would make 0.02 in a logit.
__device__ __forceinline__ float tanh_exact(float x) {
  const float e = ptx::exp2_approx(2.f * kLog2e * x);  // volatile: 64 of these at once cost registers
  return 1.f - __fdividef(2.f, e + 1.f);
}

template <int N>
__device__ __forceinline__ void cap_scores(float (&s)[N], float cap_scale) {
#pragma unroll
  for (int i = 0; i < N; ++i) s[i] = tanh_exact(s[i] * cap_scale);
}

// Scores outside the visible keys become -inf. `key` is the key of the thread's first column.
template <bool kLocal, int N>
__device__ __forceinline__ void mask_scores(float (&s)[N], const RowKeys& keys, int key) {
#pragma unroll
  for (int n = 0; n < N / 4; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = key + 8 * n + (i & 1);
      const bool visible =
          column < keys.end[i >> 1] && (!kLocal || column >= keys.begin[i >> 1]);
      if (!visible) s[4 * n + i] = -INFINITY;
    }
}

// Accumulators of 16 keys a step to the A operand of the next product.
template <typename E, int N>
__device__ __forceinline__ void pack_probabilities(uint32_t (&p)[N / 2], const float (&s)[N]) {
#pragma unroll
  for (int i = 0; i < N / 2; ++i) p[i] = ptx::pack(s[2 * i], s[2 * i + 1], E{});
}

// 4 x 4 transpose among the lanes of a quad: lane q ends with the q-th word of each lane.
__device__ __forceinline__ void quad_transpose(uint32_t (&w)[4]) {
  const int lane = threadIdx.x;
  const bool odd = lane & 1, high = lane & 2;
  uint32_t send0 = odd ? w[0] : w[1], send1 = odd ? w[2] : w[3];
  uint32_t got0 = __shfl_xor_sync(~0u, send0, 1), got1 = __shfl_xor_sync(~0u, send1, 1);
  if (odd) w[0] = got0, w[2] = got1;
  else w[1] = got0, w[3] = got1;
  send0 = high ? w[0] : w[2], send1 = high ? w[1] : w[3];
  got0 = __shfl_xor_sync(~0u, send0, 2), got1 = __shfl_xor_sync(~0u, send1, 2);
  if (high) w[0] = got0, w[1] = got1;
  else w[2] = got0, w[3] = got1;
}

// Stores the thread's two rows of columns [column, column + 2 N): normalised, 16 bytes a lane.
template <typename E, int N>
__device__ __forceinline__ void store_rows(const PrefillParams& p, const PrefillTile& tile, int kv_head, int row,
                                           int column, float (&o)[N], const float (&inverse)[2]) {
  const int lane = threadIdx.x % 4;
  E* out[2];
  bool valid[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const RowPlace place = row_place(p, row + 8 * i);
    valid[i] = place.token < tile.query_len;
    out[i] = static_cast<E*>(p.out) + (tile.query_start + place.token) * p.out_token_stride +
             (kv_head * static_cast<int64_t>(p.group.divisor) + place.head) * p.out_head_stride + column + 8 * lane;
  }
  const int columns = p.head_dim - column - 8 * lane;
#pragma unroll
  for (int n = 0; n < N / 4; n += 4) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t w[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float* pair = o + 4 * (n + j) + 2 * i;
        // In this order, or the compiler keeps products of all columns at once.
        asm volatile("" : "+f"(pair[0]), "+f"(pair[1])::"memory");
        w[j] = ptx::pack(pair[0] * inverse[i], pair[1] * inverse[i], E{});
      }
      quad_transpose(w);
      if (valid[i] && 8 * n < columns) *reinterpret_cast<uint4*>(out[i] + 8 * n) = make_uint4(w[0], w[1], w[2], w[3]);
    }
  }
}

__device__ __forceinline__ void store_lse(const PrefillParams& p, const PrefillTile& tile, int kv_head, int row,
                                          const float (&lse)[2]) {
  if (p.lse == nullptr || threadIdx.x % 4 != 0) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const RowPlace place = row_place(p, row + 8 * i);
    if (place.token >= tile.query_len) continue;
    const int64_t head = kv_head * static_cast<int64_t>(p.group.divisor) + place.head;
    p.lse[head * p.num_tokens + tile.query_start + place.token] = lse[i];
  }
}

}  // namespace bicl::prefill
