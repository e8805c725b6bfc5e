// The K largest of up to 65,535 keys in shared memory, by one CTA, in the order of their positions.
//
// Bins over the range the keys really have, a power of two apart, narrowed until the bin that holds the K-th key has
// one value or is needed whole: two rounds for most inputs, four at worst. Equal keys: the earlier position wins.
#pragma once

#include <cstdint>

namespace bicl::sparse {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr uint32_t kAlways = 0xffffffffu;  // key of what is kept whatever its score

// Greater scores have greater keys; below kAlways. -0 equals 0, NaN is least.
__device__ __forceinline__ uint32_t key_of(float score) {
  if (score != score) return 0;
  const uint32_t bits = __float_as_uint(score + 0.f);
  return min(bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u), kAlways - 1);
}

struct TopKScratch {
  uint32_t bins[kThreads];
  uint32_t sums[kWarps];
  uint32_t low, high;
  int bin, above, inside;
};

// Inclusive sum over the threads before and up to this one; `sums` is free again after the next barrier.
__device__ __forceinline__ uint32_t block_scan(uint32_t value, uint32_t* sums) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, value, step);
    if (lane >= step) value += other;
  }
  if (lane == 31) sums[warp] = value;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kWarps - 1; ++w)
    if (w < warp) value += sums[w];
  return value;
}

// Taken: keys above `key`, and the first `equal` of those equal to it.
struct Cut {
  uint32_t key;
  uint32_t equal;
};

// The cut that takes `need` (at least 1, at most end - begin) of keys[begin, end). All threads; ends with a barrier.
__device__ __forceinline__ Cut find_cut(const uint32_t* keys, int begin, int end, int need, TopKScratch& scratch) {
  if (threadIdx.x == 0) scratch.low = kAlways, scratch.high = 0;
  __syncthreads();
  uint32_t low = kAlways, high = 0;
#pragma unroll 2
  for (int i = begin + threadIdx.x; i < end; i += kThreads) {
    low = min(low, keys[i]);
    high = max(high, keys[i]);
  }
  low = __reduce_min_sync(~0u, low);
  high = __reduce_max_sync(~0u, high);
  if (threadIdx.x % 32 == 0) {
    atomicMin(&scratch.low, low);
    atomicMax(&scratch.high, high);
  }
  __syncthreads();
  low = scratch.low, high = scratch.high;
#pragma unroll 1
  while (true) {
    const int shift = max(0, 24 - __clz(high - low));  // 256 bins
    scratch.bins[threadIdx.x] = 0;
    __syncthreads();
#pragma unroll 2
    for (int i = begin + threadIdx.x; i < end; i += kThreads) {
      const uint32_t offset = keys[i] - low;
      if (offset <= high - low) atomicAdd(&scratch.bins[offset >> shift], 1);
    }
    __syncthreads();
    const int bin = kThreads - 1 - static_cast<int>(threadIdx.x);  // the highest first
    const int count = scratch.bins[bin];
    const int up_to = block_scan(count, scratch.sums);
    if (up_to - count < need && need <= up_to) {
      scratch.bin = bin;
      scratch.above = up_to - count;
      scratch.inside = count;
    }
    __syncthreads();
    low += static_cast<uint32_t>(scratch.bin) << shift;
    high = low + min(high - low, (1u << shift) - 1);
    need -= scratch.above;
    if (shift == 0) return {low, static_cast<uint32_t>(need)};
    if (scratch.inside == need && low > 0) return {low - 1, 0};
  }
}

// Writes the positions that the cut takes of keys[0, n) to list, ascending. All threads; ends with a barrier.
__device__ __forceinline__ void list_taken(const uint32_t* keys, int n, const Cut& cut, uint16_t* list,
                                           TopKScratch& scratch) {
  const int share = (n + kThreads - 1) / kThreads | 1;  // odd: neighbours meet different banks
  const int begin = min(static_cast<int>(threadIdx.x) * share, n), end = min(begin + share, n);
  uint32_t counts = 0;  // above the cut; equal to it in the upper half
#pragma unroll 2
  for (int i = begin; i < end; ++i) counts += (keys[i] > cut.key) + ((keys[i] == cut.key) << 16);
  const uint32_t before = block_scan(counts, scratch.sums) - counts;
  uint32_t above = before & 0xffff, equal = before >> 16;
#pragma unroll 2
  for (int i = begin; i < end; ++i) {
    const bool is_equal = keys[i] == cut.key;
    if (keys[i] > cut.key || (is_equal && equal < cut.equal)) list[above + min(equal, cut.equal)] = i;
    above += keys[i] > cut.key;
    equal += is_equal;
  }
  __syncthreads();
}

}  // namespace bicl::sparse
