// A warp on the CPU: 32 threads that meet at every collective. Enough of CUDA to run device functions that only
// count and vote, for tests without a GPU.
#pragma once

#include <algorithm>
#include <barrier>
#include <cstdint>
#include <functional>
#include <numeric>
#include <thread>
#include <vector>

#define __CUDACC__
#define __device__
#define __host__
#define __forceinline__ inline

struct Dim {
  unsigned x = 0;
};
inline thread_local Dim threadIdx;
inline thread_local Dim blockIdx;

namespace warp {

inline std::barrier<> meeting(32);
inline int64_t published[32];

// Publishes a value of each lane; returns all of them once every lane has come.
inline std::vector<int64_t> exchange(int64_t mine) {
  published[threadIdx.x % 32] = mine;
  meeting.arrive_and_wait();
  std::vector<int64_t> all(published, published + 32);
  meeting.arrive_and_wait();
  return all;
}

inline void run(const std::function<void(int lane)>& program) {
  std::vector<std::jthread> lanes;
  for (int lane = 0; lane < 32; ++lane)
    lanes.emplace_back([&program, lane] {
      threadIdx.x = lane;
      program(lane);
    });
}

}  // namespace warp

inline unsigned __ballot_sync(unsigned, bool vote) {
  unsigned votes = 0;
  const auto all = warp::exchange(vote);
  for (int lane = 0; lane < 32; ++lane) votes |= static_cast<unsigned>(all[lane]) << lane;
  return votes;
}
inline int __shfl_sync(unsigned, int value, int lane) { return static_cast<int>(warp::exchange(value)[lane & 31]); }
inline int __shfl_up_sync(unsigned, int value, int step) {
  const int lane = threadIdx.x % 32;
  const auto all = warp::exchange(value);
  return static_cast<int>(lane >= step ? all[lane - step] : value);
}
inline int __reduce_max_sync(unsigned, int value) {
  const auto all = warp::exchange(value);
  return static_cast<int>(*std::max_element(all.begin(), all.end()));
}
inline int __reduce_add_sync(unsigned, int value) {
  const auto all = warp::exchange(value);
  return static_cast<int>(std::accumulate(all.begin(), all.end(), int64_t{0}));
}
inline void __syncwarp() { warp::exchange(0); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return static_cast<uint64_t>(a) * b >> 32; }
inline float __fdividef(float a, float b) { return a / b; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
