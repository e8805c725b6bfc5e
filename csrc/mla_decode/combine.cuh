// Sequences that several CTAs share: each writes its part, waits until all have, and combines a slice of the result, so
// that one long sequence is summed up by as many SMs as have read it. All CTAs run at once (the launch is cooperative).
#pragma once

#include "../common/ptx.cuh"
#include "traits.cuh"

namespace bicl::mla {

// After a barrier behind the writes, by one thread. A counter's low half counts parts, the high half those who have seen
// all of them; the last of those sets it back to zero.
__device__ __forceinline__ void publish_part(int32_t* counter) {
  __threadfence();
  ptx::atomic_add_acq_rel(counter, 1);
}

constexpr int kSeen = 1 << 16;

__device__ __forceinline__ void await_parts(int32_t* counter, int parts) {
  int32_t count;
  do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
  while ((count & (kSeen - 1)) < parts);
  if (ptx::atomic_add_acq_rel(counter, kSeen) / kSeen == parts - 1) *counter = 0;
}

// What one CTA combines: `index` of `parts` equal slices of [kHeads][512].
template <typename T>
struct Slice {
  const MlaDecodeParams& p;
  int sequence, head_block, parts, index;
};

template <typename T>
__device__ __forceinline__ void write_slice(const Slice<T>& s, int vector, const float4& v) {
  using Element = typename T::Element;
  const int head = s.head_block * T::kHeads + vector / (kValueDim / 4), dim = vector % (kValueDim / 4) * 4;
  if (head >= s.p.num_heads) return;
  Element* out = static_cast<Element*>(s.p.out) + s.sequence * s.p.out_token_stride + head * s.p.out_head_stride + dim;
  *reinterpret_cast<uint2*>(out) = make_uint2(ptx::pack(v.x, v.y, Element{}), ptx::pack(v.z, v.w, Element{}));
}

// By all consumers; `shared`: kMaxParts * 2 + kHeads floats and kConsumers float4. part_of(i): the i-th part.
template <typename T, typename PartOf>
__device__ __forceinline__ void combine(const Slice<T>& s, int32_t* counter, char* shared, const PartOf& part_of) {
  constexpr int kHeadVectors = kValueDim / 4, kVectors = T::kHeads * kHeadVectors;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  auto* sums = reinterpret_cast<float4*>(shared);
  auto* weights = reinterpret_cast<float*>(shared + kConsumers * sizeof(float4));  // [heads of the slice][parts]
  const int parts = s.parts;
  if (thread == 0) await_parts(counter, parts);
  ptx::named_barrier(1, kConsumers);
  const int begin = kVectors * s.index / parts, end = kVectors * (s.index + 1) / parts;
  const int first_head = begin / kHeadVectors;
#pragma unroll 1
  for (int head = first_head + warp; head * kHeadVectors < end; head += kConsumers / 32) {
    constexpr int kEach = kMaxParts / 32;
    float2 own[kEach];  // maximum, sum
    float most = -INFINITY, sum = 0.f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int index = i * 32 + lane;
      own[i] = make_float2(-INFINITY, 0.f);
      if (index < parts)
        own[i] = __ldcg(reinterpret_cast<const float2*>(part_of(index) + T::kHeads * kValueDim) + head);
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) most = fmaxf(most, own[i].x);
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, distance));
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      own[i].x = ptx::exp2_approx(own[i].x - most);
      sum += own[i].x * own[i].y;
    }
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) sum += __shfl_xor_sync(~0u, sum, distance);
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (i * 32 + lane < parts) weights[(head - first_head) * parts + i * 32 + lane] = own[i].x / sum;
    const int number = s.head_block * T::kHeads + head;
    if (lane == 0 && s.p.lse != nullptr && number < s.p.num_heads && head * kHeadVectors >= begin)
      s.p.lse[static_cast<int64_t>(number) * s.p.sequences.batch + s.sequence] = (most + log2f(sum)) * 0.6931471805599453f;
  }
  ptx::named_barrier(1, kConsumers);

  const auto add = [&](float4& total, int vector, int i) {
    const float4 v = __ldcg(reinterpret_cast<const float4*>(part_of(i)) + vector);
    const float w = weights[(vector / kHeadVectors - first_head) * parts + i];
    total.x += w * v.x, total.y += w * v.y, total.z += w * v.z, total.w += w * v.w;
  };
  // Few vectors of many parts are read by several threads each.
  int sharers = 1;
  while ((end - begin) * sharers * 2 <= kConsumers) sharers *= 2;
  if (sharers == 1) {
    constexpr int kTurns = 4;
#pragma unroll 1
    for (int vector = begin + thread; vector < end; vector += kTurns * kConsumers) {
      float4 total[kTurns] = {};
#pragma unroll 2
      for (int i = 0; i < parts; ++i)
#pragma unroll
        for (int turn = 0; turn < kTurns; ++turn)
          if (vector + turn * kConsumers < end) add(total[turn], vector + turn * kConsumers, i);
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn)
        if (vector + turn * kConsumers < end) write_slice(s, vector + turn * kConsumers, total[turn]);
    }
  } else {
    const int lanes = kConsumers / sharers, own = thread % lanes, vector = begin + own;
    float4 total = {};
    if (vector < end) {
#pragma unroll 8
      for (int i = thread / lanes; i < parts; i += sharers) add(total, vector, i);
    }
    sums[thread] = total;
    ptx::named_barrier(1, kConsumers);
    if (thread < lanes && vector < end) {
#pragma unroll 1
      for (int i = 1; i < sharers; ++i) {
        const float4 v = sums[i * lanes + own];
        total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
      }
      write_slice(s, vector, total);
    }
  }
  ptx::named_barrier(1, kConsumers);  // what lies in shared memory has been read
}

}  // namespace bicl::mla
