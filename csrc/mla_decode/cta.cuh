// What all threads of a CTA know: parameters, the line of tiles, and where things lie in shared memory.
#pragma once

#include "share.cuh"
#include "traits.cuh"

namespace bicl::mla {

// The same in all lanes, and ptxas may know it: descriptors then live in uniform registers.
__device__ __forceinline__ uint32_t uniform(uint32_t x) { return __shfl_sync(~0u, x, 0); }

template <typename T>
class Cta {
 public:
  __device__ __forceinline__ Cta(const MlaDecodeParams& p, char* shared)
      : p_(p), shared_(shared), base_(ptx::smem_address(shared)),
        entries_(reinterpret_cast<int*>(shared + T::kEntries), p.sequences.batch) {}

 protected:
  __device__ __forceinline__ static int warpgroup() { return uniform(threadIdx.x / 128); }
  __device__ __forceinline__ Teams teams() const { return Teams(gridDim.y, entries_.total()); }
  // Of the query, served by this CTA; the team's other CTAs serve the others.
  __device__ __forceinline__ int head_block() const { return blockIdx.x; }
  __device__ __forceinline__ int team() const { return blockIdx.y; }
  __device__ __forceinline__ uint32_t stage(int i) const { return base_ + T::kRing + i * kStageBytes; }
  __device__ __forceinline__ uint32_t full(int i) const { return base_ + T::kBarriers + i * 16; }
  __device__ __forceinline__ uint32_t empty(int i) const { return full(i) + 8; }
  __device__ __forceinline__ float* maxima() const { return reinterpret_cast<float*>(shared_ + T::kStats); }
  __device__ __forceinline__ float* sums() const { return maxima(); }  // [warp of a group][head], at other times
  __device__ __forceinline__ float* references() const { return maxima() + 4 * T::kHeads; }
  __device__ __forceinline__ float* factors() const { return references() + T::kHeads; }

  // A position in the ring.
  struct Cursor {
    int stage = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void advance(int count = 1) {
      stage += count;
      if (stage >= T::kStages) stage -= T::kStages, parity ^= 1;
    }
  };

  const MlaDecodeParams& p_;
  char* const shared_;
  const uint32_t base_;
  const Entries entries_;
};

}  // namespace bicl::mla
