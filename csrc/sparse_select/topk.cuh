// The K largest of up to 65,535 keys in shared memory, by one CTA, in the order of their positions.
//
// Bins over the range the keys really have, a power of two apart, narrowed until the bin that holds the K-th key has
// one value or is needed whole: two rounds for most inputs, four at worst. Equal keys: the earlier position wins.
#pragma once

#include <cstdint>

namespace bicl::sparse {

constexpr int kMinWarps = 8, kMaxWarps = 16;  // of a CTA
constexpr int kBins = 256;
constexpr uint32_t kAlways = 0xffffffffu;  // key of what is kept whatever its score

// Greater scores have greater keys; below kAlways. -0 equals 0, NaN is least.
__device__ __forceinline__ uint32_t key_of(float score) {
  if (score != score) return 0;
  const uint32_t bits = __float_as_uint(score + 0.f);
  return min(bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u), kAlways - 1);
}

struct TopKScratch {
  static constexpr int kRounds = 4;

  alignas(16) uint32_t bins[kRounds][kBins];  // a round's own: nobody waits to clear them
  uint32_t sums[kMaxWarps];

  // All threads; a barrier must follow.
  __device__ __forceinline__ void clear() {
    if (threadIdx.x < kRounds * kBins / 4) reinterpret_cast<uint4*>(bins)[threadIdx.x] = make_uint4(0, 0, 0, 0);
  }
};
static_assert(TopKScratch::kRounds * kBins <= 32 * kMinWarps * 4, "a thread clears four bins");

// Taken: keys above `key`, and the first `equal` of those equal to it.
struct Cut {
  uint32_t key;
  uint32_t equal;
};

// The bin of the `need`-th key, and how many keys are in higher ones and in it.
struct BinFound {
  int bin, above, inside;
};

// Each warp for itself, so that no barrier follows. A lane has eight bins.
__device__ __forceinline__ BinFound find_bin(const uint32_t* bins, int need) {
  const int lane = threadIdx.x % 32;
  const uint4* fours = reinterpret_cast<const uint4*>(bins);
  const uint4 upper = fours[63 - 2 * lane], lower = fours[62 - 2 * lane];
  const uint32_t counts[8] = {upper.w, upper.z, upper.y, upper.x, lower.w, lower.z, lower.y, lower.x};
  int total = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) total += counts[i];
  int up_to = total;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, up_to, step);
    if (lane >= step) up_to += other;
  }
  int bin = 0, above = 0, inside = 0, running = up_to - total;
  const bool is_here = running < need && need <= up_to;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (running < need) bin = 8 * lane + i, above = running, inside = counts[i];
    running += counts[i];
  }
  const int from = __ffs(__ballot_sync(~0u, is_here)) - 1;
  const uint32_t both = __shfl_sync(~0u, static_cast<uint32_t>(above) << 16 | inside, from);
  return {kBins - 1 - __shfl_sync(~0u, bin, from), static_cast<int>(both >> 16), static_cast<int>(both & 0xffff)};
}

// The cut that takes `need` (at least 1, at most end - begin) of keys[begin, end), which lie in [low, high]. All
// threads; scratch must be clear.
__device__ __forceinline__ Cut find_cut(const uint32_t* keys, int begin, int end, int need, uint32_t low, uint32_t high,
                                        TopKScratch& scratch) {
#pragma unroll 1
  for (uint32_t* bins = scratch.bins[0];; bins += kBins) {
    const int shift = max(0, 24 - __clz(high - low));  // 256 bins
#pragma unroll 1
    for (int i = begin + threadIdx.x; i < end; i += blockDim.x) {
      const uint32_t offset = keys[i] - low;
      if (offset <= high - low) atomicAdd(&bins[offset >> shift], 1);
    }
    __syncthreads();
    const BinFound found = find_bin(bins, need);
    low += static_cast<uint32_t>(found.bin) << shift;
    high = low + min(high - low, (1u << shift) - 1);
    need -= found.above;
    if (shift == 0) return {low, static_cast<uint32_t>(need)};
    if (found.inside == need && low > 0) return {low - 1, 0};
  }
}

// Calls take(number, position) for every key of keys[0, n) that the cut takes, numbered by position. All threads.
template <typename Take>
__device__ __forceinline__ void for_each_taken(const uint32_t* keys, int n, const Cut& cut, TopKScratch& scratch,
                                               const Take& take) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int share = (n + warps - 1) / warps;  // of a warp
  const int begin = min(warp * share, n), end = min(begin + share, n);
  uint32_t counts = 0;  // above the cut; equal to it in the upper half
#pragma unroll 1
  for (int i = begin + lane; i < end; i += 32) counts += (keys[i] > cut.key) + ((keys[i] == cut.key) << 16);
  counts = __reduce_add_sync(~0u, counts);
  if (lane == 0) scratch.sums[warp] = counts;
  __syncthreads();
  const uint32_t before = __reduce_add_sync(~0u, lane < warp ? scratch.sums[lane] : 0);
  uint32_t above = before & 0xffff, equal = before >> 16;
  const uint32_t lower_lanes = (1u << lane) - 1;
#pragma unroll 1
  for (int first = begin; first < end; first += 32) {
    const int i = first + lane;
    const uint32_t key = i < end ? keys[i] : 0;
    const bool is_above = i < end && key > cut.key, is_equal = i < end && key == cut.key;
    const uint32_t all_above = __ballot_sync(~0u, is_above), all_equal = __ballot_sync(~0u, is_equal);
    const uint32_t own_equal = equal + __popc(all_equal & lower_lanes);
    if (is_above || (is_equal && own_equal < cut.equal))
      take(above + __popc(all_above & lower_lanes) + min(own_equal, cut.equal), i);
    above += __popc(all_above);
    equal += __popc(all_equal);
  }
}

}  // namespace bicl::sparse
