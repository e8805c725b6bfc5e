// Four neighbouring outputs of one query head while they grow, with their softmax maximum (log2 units) and sum.
// Everything that combines results goes through fold(), in a fixed order, with the same roundings wherever it runs.
#pragma once

#include <type_traits>

#include "../params.h"
#include "traits.cuh"

namespace bicl::decode {

struct Piece {
  float maximum = kLowest;
  float sum = 0.f;
  float4 out = {0.f, 0.f, 0.f, 0.f};
};

__device__ __forceinline__ void fold(Piece& a, float maximum, float sum, const float4& out) {
  const float m = fmaxf(a.maximum, maximum);
  const float wa = ptx::exp2_approx(a.maximum - m);
  const float wb = ptx::exp2_approx(maximum - m);
  a.maximum = m;
  a.sum = __fmaf_rn(sum, wb, __fmul_rn(a.sum, wa));
  a.out.x = __fmaf_rn(out.x, wb, __fmul_rn(a.out.x, wa));
  a.out.y = __fmaf_rn(out.y, wb, __fmul_rn(a.out.y, wa));
  a.out.z = __fmaf_rn(out.z, wb, __fmul_rn(a.out.z, wa));
  a.out.w = __fmaf_rn(out.w, wb, __fmul_rn(a.out.w, wa));
}

// Four neighbouring outputs of one query head, normalised, and the head's LSE beside its first.
template <typename T>
__device__ __forceinline__ void write_final(const DecodeParams& p, int sequence, int query_head, int dim,
                                            const Piece& piece) {
  const bool some = piece.sum > 0.f;
  const float factor = some ? __fdividef(p.pages.v_scale, piece.sum) : 0.f;
  const float4& o = piece.out;
  uint2 bits;
  if (T::kFp8 ? p.query_dtype == DType::kFloat16 : std::is_same_v<typename T::Compute, __half>) {
    bits = make_uint2(ptx::pack(o.x * factor, o.y * factor, __half{}), ptx::pack(o.z * factor, o.w * factor, __half{}));
  } else {
    bits = make_uint2(ptx::pack(o.x * factor, o.y * factor, __nv_bfloat16{}),
                      ptx::pack(o.z * factor, o.w * factor, __nv_bfloat16{}));
  }
  if (dim < p.head_dim)
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p.out) + sequence * p.out_token_stride +
                              query_head * p.out_head_stride + dim) = bits;
  if (p.lse != nullptr && dim == 0)
    p.lse[static_cast<int64_t>(query_head) * p.sequences.batch + sequence] =
        some ? (piece.maximum + __log2f(piece.sum)) * kLn2 : -INFINITY;
}

}  // namespace bicl::decode
