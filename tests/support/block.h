// A CTA on the CPU: one thread each, that meet at every collective. Enough of CUDA to run a kernel that only counts and
// sorts, for tests without a GPU.
#pragma once

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#define __CUDACC__
#define __device__
#define __host__
#define __global__
#define __shared__
#define __grid_constant__
#define __forceinline__ inline
#define __align__(bytes)
#define __launch_bounds__(...)

struct Dim {
  unsigned x = 0;
};
struct float2 {
  float x, y;
};
inline thread_local Dim threadIdx;

namespace block {

constexpr int kThreads = 256;

struct Warp {
  std::barrier<> meeting{32};
  int64_t published[32];
};
inline Warp warps[kThreads / 32];
inline std::barrier<> meeting(kThreads);

// Publishes a value of each lane; returns all of the warp's once every lane has come.
inline std::vector<int64_t> exchange(int64_t mine) {
  Warp& warp = warps[threadIdx.x / 32];
  warp.published[threadIdx.x % 32] = mine;
  warp.meeting.arrive_and_wait();
  std::vector<int64_t> all(warp.published, warp.published + 32);
  warp.meeting.arrive_and_wait();
  return all;
}

inline void run(const std::function<void()>& program) {
  std::vector<std::jthread> threads;
  for (int i = 0; i < kThreads; ++i)
    threads.emplace_back([&program, i] {
      threadIdx.x = i;
      program();
    });
}

}  // namespace block

inline void __syncthreads() { block::meeting.arrive_and_wait(); }
template <typename T>
T __shfl_up_sync(unsigned, T value, int step) {
  const int lane = threadIdx.x % 32;
  const auto all = block::exchange(value);
  return static_cast<T>(lane >= step ? all[lane - step] : value);
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return static_cast<T>(block::exchange(value)[threadIdx.x % 32 ^ mask]);
}
inline int __reduce_max_sync(unsigned, int value) {
  const auto all = block::exchange(value);
  return static_cast<int>(*std::max_element(all.begin(), all.end()));
}
inline int __reduce_min_sync(unsigned, int value) {
  const auto all = block::exchange(value);
  return static_cast<int>(*std::min_element(all.begin(), all.end()));
}
inline int atomicAdd(int* target, int value) { return std::atomic_ref<int>(*target).fetch_add(value); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return static_cast<uint64_t>(a) * b >> 32; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
