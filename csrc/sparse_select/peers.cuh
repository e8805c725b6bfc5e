// The CTAs of a cluster, or one CTA alone.
#pragma once

#include "../common/ptx.cuh"

namespace bicl::sparse {

constexpr int kMaxCluster = 8;  // 16 gained nothing

struct Peers {
  int count, rank;

  // Before anything is sent all must have started.
  __device__ __forceinline__ void arrive_started() const {
#if __CUDA_ARCH__ >= 900
    if (count == 1) return;
    __syncwarp();
    ptx::cluster_arrive_relaxed();
#endif
  }
  __device__ __forceinline__ void wait_started() const {
#if __CUDA_ARCH__ >= 900
    if (count == 1) return;
    __syncwarp();
    ptx::cluster_wait();
#endif
  }

  // Into CTA `to`'s copy of `target`; seen there after exchange() or join().
  __device__ __forceinline__ void send(uint32_t* target, uint32_t value, int to) const {
#if __CUDA_ARCH__ >= 900
    if (count > 1) {
      ptx::store_cluster(ptx::map_shared(ptx::smem_address(target), to), value);
      return;
    }
#endif
    *target = value;
  }
  __device__ __forceinline__ void send(uint2* target, uint32_t x, uint32_t y, int to) const {
#if __CUDA_ARCH__ >= 900
    if (count > 1) {
      ptx::store_cluster(ptx::map_shared(ptx::smem_address(target), to), make_uint2(x, y));
      return;
    }
#endif
    *target = make_uint2(x, y);
  }
  __device__ __forceinline__ void send(float* target, float value, int to) const {
    send(reinterpret_cast<uint32_t*>(target), __float_as_uint(value), to);
  }

  // Everybody waits for everybody.
  __device__ __forceinline__ void exchange() const {
#if __CUDA_ARCH__ >= 900
    if (count > 1) {
      __syncwarp();
      ptx::cluster_arrive();
      ptx::cluster_wait();
      return;
    }
#endif
    __syncthreads();
  }
  // The first CTA waits for the others, which may end.
  __device__ __forceinline__ void join() const {
#if __CUDA_ARCH__ >= 900
    if (count > 1) {
      __syncwarp();
      ptx::cluster_arrive();
      if (rank == 0) ptx::cluster_wait();
      return;
    }
#endif
    __syncthreads();
  }
};

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, step));
  return value;
}
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  return value;
}

}  // namespace bicl::sparse
