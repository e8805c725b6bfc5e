// What the layers of a step have in common, worked out once: each CTA's share, its first blocks, and the sequences'
// entries. A chain of dependent reads (lengths, page table) becomes one read at the start of each layer's kernel.
#pragma once

#include "share.cuh"

namespace bicl::decode {

// In device memory, one behind the other: [grid] shares, [grid][32] first blocks, [batch + 1] entries.
class Plan {
 public:
  __device__ __forceinline__ explicit Plan(const KernelParams& k) : base_(const_cast<char*>(k.plan)) {}

  __device__ __forceinline__ Share& share() const { return reinterpret_cast<Share*>(base_)[blockIdx.x]; }
  __device__ __forceinline__ BlockSource& block_of_lane() const {
    return reinterpret_cast<BlockSource*>(base_ + gridDim.x * sizeof(Share))[blockIdx.x * 32 + threadIdx.x % 32];
  }
  __device__ __forceinline__ Entry* entries() const {
    return reinterpret_cast<Entry*>(base_ + gridDim.x * (sizeof(Share) + 32 * sizeof(BlockSource)));
  }

 private:
  char* base_;
};

// A struct by loads of 16 bytes.
template <typename Struct>
__device__ __forceinline__ Struct read_vectors(const Struct& source) {
  Struct result;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(Struct) / 16); ++i)
    reinterpret_cast<int4*>(&result)[i] = reinterpret_cast<const int4*>(&source)[i];
  return result;
}

}  // namespace bicl::decode
