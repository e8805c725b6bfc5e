// A CTA's result while it grows: each consumer thread owns some float4 of the (head, dim) outputs of its CTA,
// with their softmax maximum (log2 units) and sum. Everything that combines results goes through fold(), in a
// fixed order, with the same roundings wherever it runs.
#pragma once

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

// Four neighbouring outputs of one query head.
__device__ __forceinline__ void write_out(const DecodeParams& p, bool vectors, int sequence, int query_head,
                                          int dim, const float4& value) {
  const float v[4] = {value.x, value.y, value.z, value.w};
  const int64_t offset = sequence * p.out_token_stride + query_head * p.out_head_stride + dim;
  auto* out = static_cast<uint16_t*>(p.out) + offset;
  uint32_t pairs[2];
#pragma unroll
  for (int i = 0; i < 2; ++i)
    pairs[i] = p.query_dtype == DType::kBFloat16 ? ptx::pack(v[2 * i], v[2 * i + 1], __nv_bfloat16{})
                                                 : ptx::pack(v[2 * i], v[2 * i + 1], __half{});
  if (vectors) {
    if (dim < p.head_dim) *reinterpret_cast<uint2*>(out) = make_uint2(pairs[0], pairs[1]);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (dim + i < p.head_dim) out[i] = static_cast<uint16_t>(pairs[i / 2] >> (16 * (i % 2)));
}

// Normalises and writes a finished piece, and the LSE if the piece starts a head's row.
__device__ __forceinline__ void write_final(const DecodeParams& p, bool vectors, int sequence, int query_head,
                                            int dim, const Piece& piece) {
  const float factor = piece.sum > 0.f ? p.pages.v_scale / piece.sum : 0.f;
  write_out(p, vectors, sequence, query_head, dim,
            make_float4(piece.out.x * factor, piece.out.y * factor, piece.out.z * factor, piece.out.w * factor));
  if (p.lse != nullptr && dim == 0)
    p.lse[static_cast<int64_t>(query_head) * p.sequences.batch + sequence] =
        piece.sum > 0.f ? (piece.maximum + log2f(piece.sum)) * kLn2 : -INFINITY;
}

}  // namespace bicl::decode
