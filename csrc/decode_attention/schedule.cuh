// Who computes what, decided on the device from the lengths alone.
//
// A sequence's visible keys are cut into blocks of 64. All blocks of all (sequence, head) pairs stand in one
// line, x = 0 .. total - 1, heads of a sequence one after the other:
//
//   sequence 0                      sequence 1
//   |head 0   |head 1   |head 2   |head 0 |head 1 |head 2 |
//   |---- CTA 0 ----|---- CTA 1 ----|---- CTA 2 ----|        stream-K: equal shares, cut anywhere
//
// "head" is a KV head, or one of its blocks of query heads where a group is larger than a CTA serves.
// Deterministic: shares are cut only at unit boundaries, which depend on the sequence's own length, and units
// are combined in order; whoever computes them, the numbers are the same.
#pragma once

#include "traits.cuh"

namespace bicl::decode {

constexpr int kMaxUnits = 32;      // units of one (sequence, head)
constexpr int kMinUnitBlocks = 8;  // 512 keys

// The blocks a sequence's one query sees.
struct Span {
  int first_key;    // first visible key
  int first_block;  // the block it lies in
  int num_blocks;
};

__device__ __forceinline__ Span visible_span(int length, int window_left, int multiple) {
  if (length <= 0) return {0, 0, 0};
  const int first_key = window_left < 0 ? 0 : max(0, length - 1 - window_left);
  const int first_block = first_key / kBlockKeys;
  const int blocks = (length + kBlockKeys - 1) / kBlockKeys - first_block;
  return {first_key, first_block, (blocks + multiple - 1) / multiple * multiple};
}

// Blocks of one unit; a multiple of 4, so that units keep the ring's groups aligned.
__device__ __forceinline__ int unit_blocks(int num_blocks) {
  const int share = (num_blocks + kMaxUnits - 1) / kMaxUnits;
  return max(kMinUnitBlocks, (share + 3) / 4 * 4);
}

// Sequence, head and block of a position in the line.
struct Place {
  int sequence, head, block, num_blocks;
};

class Line {
 public:
  // prefix[b]: blocks of one head in all sequences before b; prefix[batch] is their sum.
  __device__ Line(const int* prefix, int batch, int num_heads, int grid, bool deterministic)
      : prefix_(prefix), batch_(batch), num_heads_(num_heads), deterministic_(deterministic) {
    total_ = prefix[batch] * num_heads;
    grid_ = min(grid, total_);
  }

  __device__ __forceinline__ int total() const { return total_; }

  __device__ __forceinline__ Place place(int x) const {
    int low = 0, high = batch_;  // prefix[low] * heads <= x < prefix[high] * heads
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (prefix_[middle] * num_heads_ <= x) low = middle;
      else high = middle;
    }
    const int blocks = prefix_[low + 1] - prefix_[low];
    const int rest = x - prefix_[low] * num_heads_;
    const int head = rest / blocks;
    return {low, head, rest - head * blocks, blocks};
  }

  // Where CTA `cta`'s share begins; that of cta + 1 is where it ends.
  __device__ __forceinline__ int begin(int cta) const {
    if (cta >= grid_) return total_;
    const int x = static_cast<int>(static_cast<int64_t>(cta) * total_ / grid_);
    return deterministic_ ? next_unit(x) : x;
  }

  // The CTA that holds x (deterministic: x begins a unit).
  __device__ __forceinline__ int owner(int x) const {
    return static_cast<int>((static_cast<int64_t>(x + 1) * grid_ - 1) / total_);
  }

 private:
  __device__ __forceinline__ int next_unit(int x) const {
    const Place p = place(x);
    const int unit = unit_blocks(p.num_blocks);
    return x - p.block + min((p.block + unit - 1) / unit * unit, p.num_blocks);
  }

  const int* prefix_;
  int batch_, num_heads_, grid_, total_;
  bool deterministic_;
};

// prefix[0 .. batch] from the lengths; also returns the longest in *longest. All threads; ends with a barrier.
__device__ __forceinline__ void build_prefix(int* prefix, int* longest, const int32_t* lengths, int batch,
                                             int window_left, int multiple) {
  for (int b = threadIdx.x; b < batch; b += blockDim.x)
    prefix[b + 1] = visible_span(lengths[b], window_left, multiple).num_blocks;
  __syncthreads();
  if (threadIdx.x < 32) {
    const int lane = threadIdx.x;
    int carry = 0, most = 0;
    for (int base = 0; base < batch; base += 32) {
      int sum = base + lane < batch ? prefix[base + lane + 1] : 0;
      most = max(most, sum);
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
      }
      if (base + lane < batch) prefix[base + lane + 1] = carry + sum;
      carry += __shfl_sync(~0u, sum, 31);
    }
    most = __reduce_max_sync(~0u, most);
    if (lane == 0) prefix[0] = 0, *longest = most;
  }
  __syncthreads();
}

}  // namespace bicl::decode
