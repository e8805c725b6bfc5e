// The results of a CTA's warps to one, when a unit of work ends.
#pragma once

#include "block.cuh"
#include "combine.cuh"

namespace bicl::decode {

template <typename T>
class Merger : protected Combiner<T> {
 protected:
  using Base = Combiner<T>;
  using Base::lane_;
  using Base::p_;
  using Base::warp_;
  using Base::for_vectors;
  using Base::get_kept;
  using Base::keep;
  using Base::merge_rows;
  using Base::push;
  using Base::put_partial;
  using Base::stats;
  using Base::Base;

  // Where a unit's result goes.
  struct Target {
    enum Kind { kFinal, kWorkspace, kCluster, kKeep } kind;
    bool fold;  // onto what was kept
    int slot;   // of the workspace, or the part of the cluster's result
  };

  // The warps' states to one piece a thread, and on to its target. The merge buffer must be free.
  __device__ __forceinline__ void merge(WarpState<T>& state, int sequence, const Heads& heads, const Target& target) {
    put_state(state, heads.active);
    ptx::named_barrier(kConsumersOnly, T::kConsumers);
    for_vectors(heads, [&](int v, int row, int dim) {
      Piece piece = merged(row, dim);
      if (target.fold) {
        Piece kept = get_kept(v);
        fold(kept, piece.maximum, piece.sum, piece.out);
        piece = kept;
      }
      switch (target.kind) {
        case Target::kFinal:
          write_final<T>(p_, sequence, heads.first_query + row, dim, piece);
          break;
        case Target::kWorkspace: put_partial(target.slot, row, dim, piece); break;
        case Target::kCluster: push(target.slot, v, piece); break;
        case Target::kKeep: keep(v, piece); break;
      }
    });
  }

  __device__ __forceinline__ void put_state(WarpState<T>& state, int active) const {
    const int g = lane_ / 4, t = lane_ % 4;
    float* rows = merge_rows() + (warp_ * T::kHeads + 2 * t) * T::kMergeStride;
#pragma unroll
    for (int n = 0; n < T::kHeadBlocks; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float sum = state.sum[n][j];
        sum += __shfl_xor_sync(~0u, sum, 4);
        sum += __shfl_xor_sync(~0u, sum, 8);
        sum += __shfl_xor_sync(~0u, sum, 16);
        if (g == 0) stats()[warp_ * T::kHeads + 8 * n + 2 * t + j] = make_float2(state.maximum[n][j], sum);
        if (8 * n >= active) continue;
        float* row = rows + (8 * n + j) * T::kMergeStride + (T::kFp8 ? 2 * g : g);
#pragma unroll
        for (int d = 0; d < WarpState<T>::kSteps; ++d)
          if constexpr (T::kFp8) {
            *reinterpret_cast<float2*>(row + 16 * d) = make_float2(state.out[d][n][j], state.out[d][n][j + 2]);
          } else {
            row[16 * d] = state.out[d][n][j];
            row[16 * d + 8] = state.out[d][n][j + 2];
          }
      }
  }

  __device__ __forceinline__ Piece merged(int row, int dim) const {
    Piece all;
#pragma unroll
    for (int w = 0; w < T::kConsumerWarps; ++w)
      all.maximum = fmaxf(all.maximum, stats()[w * T::kHeads + row].x);
#pragma unroll
    for (int w = 0; w < T::kConsumerWarps; ++w) {
      const float2 stat = stats()[w * T::kHeads + row];
      const float weight = ptx::exp2_approx(stat.x - all.maximum);
      const float4 out =
          *reinterpret_cast<const float4*>(merge_rows() + (w * T::kHeads + row) * T::kMergeStride + dim);
      all.sum = __fmaf_rn(stat.y, weight, all.sum);
      all.out.x = __fmaf_rn(out.x, weight, all.out.x);
      all.out.y = __fmaf_rn(out.y, weight, all.out.y);
      all.out.z = __fmaf_rn(out.z, weight, all.out.z);
      all.out.w = __fmaf_rn(out.w, weight, all.out.w);
    }
    return all;
  }
};

}  // namespace bicl::decode
