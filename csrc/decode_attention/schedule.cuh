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

#include "../common/fast_div.h"
#include "traits.cuh"

namespace bicl::decode {

constexpr int kMaxUnits = 16;  // units of one (sequence, head)

// One sequence; `before` of the entry past the last one is the sum.
struct Entry {
  int before;  // blocks of one head in all sequences before this one
  int length;  // tokens
};

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
  return {first_key, first_block, (blocks + multiple - 1) & ~(multiple - 1)};
}

// Blocks of one unit: 256 keys in short sequences, 512 and more in long ones. A multiple of 4, so that units keep
// the ring's groups aligned.
__device__ __forceinline__ int unit_blocks(int num_blocks) {
  if (num_blocks <= 32) return 4;
  const int share = (num_blocks + kMaxUnits - 1) / kMaxUnits;
  return max(8, (share + 3) & ~3);
}

__device__ __forceinline__ int num_units(int num_blocks) {
  const int unit = unit_blocks(num_blocks);
  return (num_blocks + unit - 1) / unit;
}

// Fills entries[0 .. batch]. One warp.
__device__ __forceinline__ void build_entries(Entry* entries, const Sequences& sequences, int window_left,
                                              int multiple) {
  constexpr int kPerLane = 4;  // neighbouring sequences a lane counts itself
  const int lane = threadIdx.x % 32;
  int carry = 0;
#pragma unroll 1
  for (int base = 0; base < sequences.batch; base += 32 * kPerLane) {
    const int first = base + lane * kPerLane;
    int length[kPerLane], before[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
      length[i] = first + i < sequences.batch ? sequences.cache_seqlens[first + i] : 0;
    int own = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      before[i] = own;
      own += visible_span(length[i], window_left, multiple).num_blocks;
    }
    int sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
      if (first + i < sequences.batch) entries[first + i] = {carry + sum - own + before[i], length[i]};
    carry += __shfl_sync(~0u, sum, 31);
  }
  if (lane == 0) entries[sequences.batch] = {carry, 0};
}

// Sequence, head and block of a position in the line.
struct Place {
  int sequence, head, block, num_blocks, length;
};

// What "head" stands for.
struct Heads {
  int kv;           // KV head
  int first_query;  // first query head a CTA serves for it
  int active;       // how many
};

class Line {
 public:
  __device__ __forceinline__ Line(const Entry* entries, int batch, int num_heads, const FastDiv& grid,
                                  bool deterministic)
      : entries_(entries), batch_(batch), num_heads_(num_heads), grid_(grid), deterministic_(deterministic) {
    total_ = entries[batch].before * num_heads;
  }

  __device__ __forceinline__ int total() const { return total_; }

  __device__ __forceinline__ Place place(int x) const {
    int low = 0, high = batch_;  // entries[low].before * heads <= x < entries[high].before * heads
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (entries_[middle].before * num_heads_ <= x) low = middle;
      else high = middle;
    }
    const Entry entry = entries_[low];
    const unsigned blocks = entries_[low + 1].before - entry.before;
    const unsigned rest = x - entry.before * num_heads_;
    const unsigned head = rest / blocks;
    return {low, static_cast<int>(head), static_cast<int>(rest - head * blocks), static_cast<int>(blocks),
            entry.length};
  }

  // Where CTA `cta`'s share begins; that of cta + 1 is where it ends.
  __device__ __forceinline__ int begin(int cta) const {
    const int x = even_share(cta);
    return deterministic_ && x < total_ ? next_unit(x) : x;
  }

  // The CTA that holds x (deterministic: x begins a unit).
  __device__ __forceinline__ int owner(int x) const {
    const int grid = grid_.divisor;
    if (total_ < grid) return x;
    int cta = min(static_cast<int>(__fdividef((x + 0.5f) * grid, static_cast<float>(total_))), grid - 1);
    while (even_share(cta) > x) --cta;
    while (even_share(cta + 1) <= x) ++cta;
    return cta;
  }

 private:
  // floor(cta * total / grid); one block each where there are fewer blocks than CTAs.
  __device__ __forceinline__ int even_share(int cta) const {
    if (total_ < static_cast<int>(grid_.divisor)) return min(cta, total_);
    uint32_t rest;
    const uint32_t quotient = grid_.divide(total_, rest);
    return cta * quotient + grid_.divide(cta * rest);
  }

  __device__ __forceinline__ int next_unit(int x) const {
    const Place p = place(x);
    const int unit = unit_blocks(p.num_blocks);
    return x - p.block + min((p.block + unit - 1) / unit * unit, p.num_blocks);
  }

  const Entry* entries_;
  int batch_, num_heads_, total_;
  const FastDiv& grid_;
  bool deterministic_;
};

}  // namespace bicl::decode
