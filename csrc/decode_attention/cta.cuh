// What every part of a decode CTA knows: its parameters, its threads, where things lie in shared memory.
#pragma once

#include "kernel_params.h"
#include "schedule.cuh"
#include "traits.cuh"

namespace bicl::decode {

enum NamedBarrier { kReady = 1, kConsumersOnly = 2, kBarriersReady = 3 };

template <typename T>
class Cta {
 protected:
  using Shared = SharedPlan<T>;

  __device__ explicit Cta(const KernelParams& kp)
      : k_(kp), p_(kp.p), warp_(threadIdx.x / 32), lane_(threadIdx.x % 32) {}

  __device__ __forceinline__ Heads heads_of(int head) const {
    uint32_t block;
    const int kv = k_.head_blocks.divide(head, block);
    const int first = block * T::kHeads;
    return {kv, kv * k_.group + first, min(T::kHeads, k_.group - first)};
  }

  // Calls f(vector, row, dim) for each float4 of the outputs that is this thread's.
  template <typename F>
  __device__ __forceinline__ void for_vectors(const Heads& heads, F&& f) const {
    const int vectors = heads.active * (T::kHeadDim / 4);
#pragma unroll 1
    for (int v = threadIdx.x; v < vectors; v += T::kConsumers)
      f(v, v / (T::kHeadDim / 4), v % (T::kHeadDim / 4) * 4);
  }

  // --- shared memory ------------------------------------------------------------------------------------
  // Not a member, so that the compiler sees the address space.
  __device__ __forceinline__ static char* shared() {
    extern __shared__ __align__(1024) char base[];
    return base;
  }
  __device__ __forceinline__ float* merge_rows() const { return reinterpret_cast<float*>(shared()); }
  // Slots to combine; the merge buffer is free then.
  __device__ __forceinline__ int* list() const { return reinterpret_cast<int*>(shared()); }
  __device__ __forceinline__ float2* stats() const { return reinterpret_cast<float2*>(shared() + Shared::kStats); }
  // What is kept from unit to unit, or what the peers of a cluster pushed.
  __device__ __forceinline__ float4* result() const { return reinterpret_cast<float4*>(shared() + Shared::kResult); }
  __device__ __forceinline__ float2* result_stats() const {
    return reinterpret_cast<float2*>(shared() + Shared::kResultStats);
  }
  __device__ __forceinline__ static char* query_slot(int slot) {
    return shared() + Shared::kQuery - slot * T::kQueryBytes;
  }
  __device__ __forceinline__ uint32_t full(int stage) const {
    return ptx::smem_address(shared() + Shared::kBarriers) + stage * 16;
  }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(stage) + 8; }
  __device__ __forceinline__ uint32_t peers_done() const { return full(Shared::kMaxStages); }
  __device__ __forceinline__ int& is_last() const { return *reinterpret_cast<int*>(shared() + Shared::kScalars); }
  __device__ __forceinline__ uint32_t ring(int stage) const {
    return ptx::smem_address(shared() + Shared::kRing) + stage * T::kStageBytes;
  }
  __device__ __forceinline__ Entry* entries() const {
    return reinterpret_cast<Entry*>(shared() + Shared::kRing + k_.stages * T::kStageBytes);
  }

  const KernelParams& k_;
  const DecodeParams& p_;
  const int warp_, lane_;
};

}  // namespace bicl::decode
