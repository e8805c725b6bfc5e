// Who computes what, decided on the device from the lengths alone.
//
// A sequence's visible keys are cut into blocks of 64. All blocks of all (sequence, head) pairs stand in one
// line, x = 0 .. total - 1, heads of a sequence one after the other:
//
//   sequence 0                      sequence 1
//   |head 0   |head 1   |head 2   |head 0 |head 1 |head 2 |
//   |---- CTA 0 ----|---- CTA 1 ----|---- CTA 2 ----|        stream-K: equal shares, cut anywhere
//
// Where CTAs work on several heads each, ending one counts as a block more, or CTAs full of short sequences would
// come last.
//
// "head" is a KV head, or one of its blocks of query heads where a group is larger than a CTA serves.
// Deterministic: shares are cut only at unit boundaries, which depend on the sequence's own length, and units
// are combined in order; whoever computes them, the numbers are the same.
#pragma once

#include "../common/fast_div.h"
#include "traits.cuh"

namespace bicl::decode {

constexpr int kMaxUnits = 16;  // units of one (sequence, head)

// One sequence; the entry past the last one holds the sums.
struct Entry {
  int before;       // blocks of one head in all sequences before this one
  int used_before;  // how many of those sequences have any
  int length;       // tokens
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
  int blocks_carry = 0, used_carry = 0;
#pragma unroll 1
  for (int base = 0; base < sequences.batch; base += 32 * kPerLane) {
    const int first = base + lane * kPerLane;
    int length[kPerLane], blocks[kPerLane];
    int own_blocks = 0, own_used = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
      length[i] = first + i < sequences.batch ? sequences.cache_seqlens[first + i] : 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      blocks[i] = visible_span(length[i], window_left, multiple).num_blocks;
      own_blocks += blocks[i];
      own_used += blocks[i] > 0;
    }
    int blocks_sum = own_blocks, used_sum = own_used;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other_blocks = __shfl_up_sync(~0u, blocks_sum, step);
      const int other_used = __shfl_up_sync(~0u, used_sum, step);
      if (lane >= step) blocks_sum += other_blocks, used_sum += other_used;
    }
    int before = blocks_carry + blocks_sum - own_blocks, used = used_carry + used_sum - own_used;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (first + i < sequences.batch) entries[first + i] = {before, used, length[i]};
      before += blocks[i];
      used += blocks[i] > 0;
    }
    blocks_carry += __shfl_sync(~0u, blocks_sum, 31);
    used_carry += __shfl_sync(~0u, used_sum, 31);
  }
  if (lane == 0) entries[sequences.batch] = {blocks_carry, used_carry, 0};
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
    // Ending a head costs about as much as a block. It matters where CTAs work on several.
    const Entry sum = entries[batch];
    head_cost_ = sum.used_before * num_heads > static_cast<int>(grid.divisor) ? 1 : 0;
    total_cost_ = (sum.before + head_cost_ * sum.used_before) * num_heads;
  }

  __device__ __forceinline__ Place place(int x) const {
    const int sequence = find(x, 0);
    const Entry entry = entries_[sequence];
    const unsigned blocks = entries_[sequence + 1].before - entry.before;
    const unsigned rest = x - entry.before * num_heads_;
    const unsigned head = rest / blocks;
    return {sequence, static_cast<int>(head), static_cast<int>(rest - head * blocks), static_cast<int>(blocks),
            entry.length};
  }

  // Where CTA `cta`'s share begins; that of cta + 1 is where it ends.
  __device__ __forceinline__ int begin(int cta) const {
    const int cost = even_share(cta);
    if (cost >= total_cost_) return entries_[batch_].before * num_heads_;
    if (head_cost_ == 0 && !deterministic_) return cost;
    const int sequence = find(cost, head_cost_);
    const Entry entry = entries_[sequence];
    const int blocks = entries_[sequence + 1].before - entry.before;
    const int rest = cost - (entry.before + head_cost_ * entry.used_before) * num_heads_;
    const int head = static_cast<unsigned>(rest) / static_cast<unsigned>(blocks + head_cost_);
    int block = rest - head * (blocks + head_cost_);
    if (deterministic_) {
      const int unit = unit_blocks(blocks);
      block = (block + unit - 1) / unit * unit;
    }
    return entry.before * num_heads_ + head * blocks + min(block, blocks);
  }

  // The CTA that computes block `block` of a place's head (deterministic: a block that begins a unit).
  __device__ __forceinline__ int owner(const Place& place, int block) const {
    const Entry entry = entries_[place.sequence];
    const int cost = (entry.before + head_cost_ * entry.used_before) * num_heads_ +
                     place.head * (place.num_blocks + head_cost_) + block;
    const int grid = grid_.divisor;
    if (total_cost_ < grid) return cost;
    int cta = min(static_cast<int>(__fdividef((cost + 0.5f) * grid, static_cast<float>(total_cost_))), grid - 1);
    while (even_share(cta) > cost) --cta;
    while (even_share(cta + 1) <= cost) ++cta;
    return cta;
  }

 private:
  // The sequence that holds position x where every head of a sequence is `extra` longer than its blocks.
  __device__ __forceinline__ int find(int x, int extra) const {
    int low = 0, high = batch_;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if ((entries_[middle].before + extra * entries_[middle].used_before) * num_heads_ <= x) low = middle;
      else high = middle;
    }
    return low;
  }

  // floor(cta * total / grid); one each where there is less than one a CTA.
  __device__ __forceinline__ int even_share(int cta) const {
    if (total_cost_ < static_cast<int>(grid_.divisor)) return min(cta, total_cost_);
    uint32_t rest;
    const uint32_t quotient = grid_.divide(total_cost_, rest);
    return cta * quotient + grid_.divide(cta * rest);
  }

  const Entry* entries_;
  int batch_, num_heads_, head_cost_, total_cost_;
  const FastDiv& grid_;
  bool deterministic_;
};

}  // namespace bicl::decode
