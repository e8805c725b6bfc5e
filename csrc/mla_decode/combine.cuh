// Sequences that several CTAs share: each writes its part, waits until all have, and combines a slice of the result, so
// that one long sequence is summed up by as many SMs as have read it. All CTAs run at once (the launch is cooperative).
#pragma once

#include "../common/ptx.cuh"
#include "traits.cuh"

namespace bicl::mla {

enum Barrier { kAll = 1, kCombine = kAll, kWarpgroup = 2, kPublish = 4 };  // named; + a warpgroup, a part's slot

// After a barrier behind the writes, by one thread. A counter's low half counts parts, the high half those who have
// seen all of them; the last of those sets it back to zero.
__device__ __forceinline__ void publish_part(int32_t* counter) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}

constexpr int kSeen = 1 << 16;

__device__ __forceinline__ void await_parts(const int32_t* counter, int parts) {
  int32_t count;
  do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
  while ((count & (kSeen - 1)) < parts);
}

// Later, by the same thread: nothing waits for it.
__device__ __forceinline__ void leave_parts(int32_t* counter, int parts) {
  if (atomicAdd(counter, kSeen) / kSeen == parts - 1) *counter = 0;
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

// The parts of a sequence: those of teams that follow each other, the first in the slot of what begins a sequence.
template <typename T>
class Parts {
 public:
  // `first`: of the first team, that slot.
  __device__ __forceinline__ Parts(const float* first, int stride) : first_(first), stride_(stride) {}

  __device__ __forceinline__ float4 vector(int part, int index) const {
    return __ldcg(reinterpret_cast<const float4*>(first_ + offset(part)) + index);
  }
  // The reference of a head's exponents, and the sum of its probabilities.
  __device__ __forceinline__ float2 stats(int part, int head) const {
    return __ldcg(reinterpret_cast<const float2*>(first_ + offset(part) + T::kHeads * kValueDim) + head);
  }

 private:
  __device__ __forceinline__ int offset(int part) const { return part == 0 ? 0 : part * stride_ - T::kPartFloats; }

  const float* first_;
  int stride_;
};

// By all consumers; `shared`: kConsumers float4 and 2 * kMaxParts + kHeads floats.
template <typename T>
__device__ __forceinline__ void combine(const Slice<T>& s, const Parts<T>& all, int32_t* counter, char* shared) {
  constexpr int kHeadVectors = kValueDim / 4, kVectors = T::kHeads * kHeadVectors;
  constexpr int kColumns = 2, kRows = 4;  // vectors and parts that a thread reads at once
  const int thread = threadIdx.x, lane = thread % 32, parts = s.parts;
  auto* sums = reinterpret_cast<float4*>(shared);
  auto* weights = reinterpret_cast<float*>(shared + kConsumers * sizeof(float4));  // [heads of the slice][parts]
  const int begin = kVectors * s.index / parts, end = kVectors * (s.index + 1) / parts;
  const int first_head = begin / kHeadVectors;
  // Few vectors of many parts are read by several threads each.
  int sharers = 1;
  while ((end - begin) * sharers * 2 <= kConsumers) sharers *= 2;
  const int lanes = kConsumers / sharers;
  int vector = begin + thread % lanes, part = thread / lanes;
  float4 read[kColumns][kRows];
  const auto load = [&] {
#pragma unroll
    for (int column = 0; column < kColumns; ++column)
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        read[column][row] = make_float4(0.f, 0.f, 0.f, 0.f);
        if (part + row * sharers < parts && vector + column * lanes < end)
          read[column][row] = all.vector(part + row * sharers, vector + column * lanes);
      }
  };
  if (thread == 0) await_parts(counter, parts);
  ptx::named_barrier(kCombine, kConsumers);
  load();  // on its way while the weights are worked out
#pragma unroll 1
  for (int head = first_head + thread / 32; head * kHeadVectors < end; head += kConsumers / 32) {
    float* const own = weights + (head - first_head) * parts;
    float most = -INFINITY, sum = 0.f;  // over this lane's parts
#pragma unroll 1
    for (int i = lane; i < parts; i += 32) {
      const float2 stats = all.stats(i, head);
      const float higher = fmaxf(most, stats.x);
      sum = sum * ptx::exp2_approx(most - higher) + stats.y * ptx::exp2_approx(stats.x - higher);
      most = higher;
      own[i] = stats.x;
    }
    float highest = most;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2)
      highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, distance));
    sum *= ptx::exp2_approx(most - highest);
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    const float inverse = 1.f / sum;
#pragma unroll 1
    for (int i = lane; i < parts; i += 32) own[i] = ptx::exp2_approx(own[i] - highest) * inverse;
    const int number = s.head_block * T::kHeads + head;
    if (lane == 0 && s.p.lse != nullptr && number < s.p.num_heads && head * kHeadVectors >= begin)
      s.p.lse[static_cast<int64_t>(number) * s.p.sequences.batch + s.sequence] = (highest + log2f(sum)) * kLn2;
  }
  sums[thread] = make_float4(0.f, 0.f, 0.f, 0.f);
  ptx::named_barrier(kCombine, kConsumers);
  float4 total[kColumns] = {};
#pragma unroll 1
  while (vector < end) {
#pragma unroll
    for (int column = 0; column < kColumns; ++column)
#pragma unroll
      for (int row = 0; row < kRows; ++row)
        if (part + row * sharers < parts && vector + column * lanes < end) {
          const int head = (vector + column * lanes) / kHeadVectors - first_head;
          const float weight = weights[head * parts + part + row * sharers];
          const float4& v = read[column][row];
          total[column].x += weight * v.x, total[column].y += weight * v.y;
          total[column].z += weight * v.z, total[column].w += weight * v.w;
        }
    part += kRows * sharers;
    if (part >= parts) {
#pragma unroll
      for (int column = 0; column < kColumns; ++column) {
        if (sharers > 1 && column == 0) sums[thread] = total[column];
        else if (vector + column * lanes < end) write_slice(s, vector + column * lanes, total[column]);
        total[column] = make_float4(0.f, 0.f, 0.f, 0.f);
      }
      part = thread / lanes;
      vector += kColumns * lanes;
    }
    load();
  }
  if (sharers > 1) {
    ptx::named_barrier(kCombine, kConsumers);
    if (thread < lanes && begin + thread < end) {
      float4 sum = sums[thread];
#pragma unroll 4
      for (int i = 1; i < sharers; ++i) {
        const float4 v = sums[i * lanes + thread];
        sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
      }
      write_slice(s, begin + thread, sum);
    }
  }
  if (thread == 0) leave_parts(counter, parts);
  ptx::named_barrier(kCombine, kConsumers);  // what lies in shared memory has been read
}

}  // namespace bicl::mla
