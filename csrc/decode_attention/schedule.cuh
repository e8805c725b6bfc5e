// Who computes what, decided on the device from the lengths alone.
//
// A sequence's visible keys are cut into blocks of 64, and the CTAs into teams, whose members take different heads. All
// blocks of all sequences and of the heads of one member stand in one line, x = 0 .. total - 1, heads of a sequence one
// after the other. Teams of two, four heads:
//
//                sequence 0          sequence 1
//   member 0     |head 0  |head 2  |head 0 |head 2 |
//   member 1     |head 1  |head 3  |head 1 |head 3 |
//                |--- team 0 ---|--- team 1 ---|        stream-K: equal shares, cut anywhere
//
// A head may be charged as more blocks than it has, since its end takes time too: CTAs full of short sequences would
// come last.
//
// "head" is a KV head, or one of its blocks of query heads where a group is larger than a CTA serves.
// Deterministic: shares are cut only at unit boundaries, which depend on the sequence's own length, and units
// are combined in order; whoever computes them, the numbers are the same.
#pragma once

#include "../common/fast_div.h"
#include "kernel_params.h"
#include "traits.cuh"

namespace bicl::decode {

constexpr int kMaxUnits = 16;  // units of one (sequence, head)

// One sequence; the entry past the last one holds the sums.
struct Entry {
  int before;         // blocks of one head in all sequences before this one
  int charge_before;  // what they are charged
  int length;         // tokens
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

// Blocks of one unit: 128 keys in the shortest sequences, 512 and more in long ones. A multiple of the ring's groups
// (1, 2 or 4), which thus take the same blocks of a unit wherever a share begins.
__device__ __forceinline__ int unit_blocks(int num_blocks, int groups) {
  if (num_blocks <= 8) return max(2, groups);
  if (num_blocks <= 32) return 4;
  const int share = (num_blocks + kMaxUnits - 1) / kMaxUnits;
  return max(8, (share + 3) & ~3);
}

__device__ __forceinline__ int num_units(int num_blocks, int groups) {
  const int unit = unit_blocks(num_blocks, groups);
  if (unit == 2) return (num_blocks + 1) / 2;  // no division
  if (unit == 4) return (num_blocks + 3) / 4;
  return (num_blocks + unit - 1) / unit;
}

// What a head of so many blocks counts when work is divided. All that is more than its blocks comes behind them: the
// CTAs between those that own its first and last block must own some of it, since their parts are read unasked.
__device__ __forceinline__ int charge_of(int num_blocks, const Charge& charge) {
  return num_blocks > 0 ? max(num_blocks + charge.end, charge.least) : 0;
}

// Fills entries[0 .. batch]. One warp.
__device__ __forceinline__ void build_entries(Entry* entries, const Sequences& sequences, int window_left,
                                              int multiple, const Charge& charge) {
  constexpr int kPerLane = 4;  // neighbouring sequences a lane counts itself
  const int lane = threadIdx.x % 32;
  int blocks_carry = 0, charge_carry = 0;
  int next[kPerLane];  // on their way while the ones before are counted
  const auto load = [&](int first) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
      next[i] = first + i < sequences.batch ? sequences.cache_seqlens[first + i] : 0;
  };
  load(lane * kPerLane);
#pragma unroll 1
  for (int base = 0; base < sequences.batch; base += 32 * kPerLane) {
    const int first = base + lane * kPerLane;
    int length[kPerLane], blocks[kPerLane];
    int own_blocks = 0, own_charge = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) length[i] = next[i];
    load(first + 32 * kPerLane);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      blocks[i] = visible_span(length[i], window_left, multiple).num_blocks;
      own_blocks += blocks[i];
      own_charge += charge_of(blocks[i], charge);
    }
    int blocks_sum = own_blocks, charge_sum = own_charge;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other_blocks = __shfl_up_sync(~0u, blocks_sum, step);
      const int other_charge = __shfl_up_sync(~0u, charge_sum, step);
      if (lane >= step) blocks_sum += other_blocks, charge_sum += other_charge;
    }
    int before = blocks_carry + blocks_sum - own_blocks, charged = charge_carry + charge_sum - own_charge;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (first + i < sequences.batch) entries[first + i] = {before, charged, length[i]};
      before += blocks[i];
      charged += charge_of(blocks[i], charge);
    }
    blocks_carry += __shfl_sync(~0u, blocks_sum, 31);
    charge_carry += __shfl_sync(~0u, charge_sum, 31);
  }
  if (lane == 0) entries[sequences.batch] = {blocks_carry, charge_carry, 0};
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

// A CTA's positions in the line, a sequence not behind the first, and how many blocks at the end are of a head that
// another CTA ends.
struct Bounds {
  int begin, end, sequence, split;
};

// As CTA `cta` sees it.
class Line {
 public:
  __device__ __forceinline__ Line(const Entry* entries, int batch, const Teams& teams, int cta, bool deterministic,
                                  int groups, const Charge& charge)
      : entries_(entries), batch_(batch), teams_(teams), deterministic_(deterministic), groups_(groups),
        charge_(charge), total_(entries[batch].charge_before * teams.heads) {
    team_ = teams.size.divide(cta, member_);
  }

  // `hint`: a sequence not behind the one sought, and probably it.
  __device__ __forceinline__ Place place(int x, int hint) const {
    const int sequence = x < entries_[hint + 1].before * teams_.heads ? hint : find(x);
    const Entry entry = entries_[sequence];
    const unsigned blocks = entries_[sequence + 1].before - entry.before;
    const unsigned rest = x - entry.before * teams_.heads;
    const unsigned head = rest / blocks;
    return {sequence, static_cast<int>(head * teams_.size.divisor + member_), static_cast<int>(rest - head * blocks),
            static_cast<int>(blocks), entry.length};
  }

  // Moves on to the next head that has blocks; there must be one.
  __device__ __forceinline__ void advance(int& sequence, int& head) const {
    head += teams_.size.divisor;
    if (head < static_cast<int>(teams_.heads * teams_.size.divisor)) return;
    head = member_;
    do ++sequence;
    while (blocks(sequence) == 0);
  }

  // The head that follows a place's, from its first block; there must be one.
  __device__ __forceinline__ Place after(const Place& place) const {
    int sequence = place.sequence, head = place.head;
    advance(sequence, head);
    return {sequence, head, 0, blocks(sequence), entries_[sequence].length};
  }

  __device__ __forceinline__ int blocks(int sequence) const {
    return entries_[sequence + 1].before - entries_[sequence].before;
  }

  // The CTA's share. By a whole warp, of which each half looks for one end.
  __device__ __forceinline__ Bounds share() const {
    int sequence = 0, split = 0;
    const int end = begin(team_ + static_cast<int>(threadIdx.x % 32 / 16), sequence, split);
    return {__shfl_sync(~0u, end, 0), __shfl_sync(~0u, end, 16), __shfl_sync(~0u, sequence, 0),
            __shfl_sync(~0u, split, 16)};
  }

  // The CTA that computes block `block` of a place's head (deterministic: a block that begins a unit).
  __device__ __forceinline__ int owner(const Place& place, int block) const {
    const int charge = entries_[place.sequence].charge_before * teams_.heads +
                       teams_.size.divide(place.head) * charge_of(place.num_blocks, charge_) + block;
    return team_of(charge) * teams_.size.divisor + member_;
  }

 private:
  // The team whose share holds a position counted in charges.
  __device__ __forceinline__ int team_of(int charge) const {
    const int teams = teams_.count.divisor;
    if (total_ < teams) return charge;
    int team = min(static_cast<int>(__fdividef((charge + 0.5f) * teams, static_cast<float>(total_))), teams - 1);
    while (even_share(team) > charge) --team;
    while (even_share(team + 1) <= charge) ++team;
    return team;
  }

  // The sequence that holds position x.
  __device__ __forceinline__ int find(int x) const {
    int low = 0, high = batch_;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (entries_[middle].before * teams_.heads <= x) low = middle;
      else high = middle;
    }
    return low;
  }

  // Where a team's share begins, a sequence not behind it, and how many blocks of the head there lie before it. By half
  // a warp, beside the other half.
  __device__ __forceinline__ int begin(int team, int& sequence, int& split) const {
    const int charge = even_share(team);
    sequence = find_charge(charge);
    if (charge >= total_) return entries_[batch_].before * teams_.heads;
    const Entry entry = entries_[sequence];
    const int blocks = entries_[sequence + 1].before - entry.before;
    const unsigned rest = charge - entry.charge_before * teams_.heads;
    const unsigned per_head = charge_of(blocks, charge_);
    const int head = rest / per_head;
    int block = rest - head * per_head;
    if (deterministic_) {
      const int unit = unit_blocks(blocks, groups_);
      block = (block + unit - 1) / unit * unit;
    }
    split = block < blocks ? block : 0;
    return entry.before * teams_.heads + head * blocks + min(block, blocks);
  }

  // The sequence that holds a position counted in charges; half a warp looks at 16 places at a time.
  __device__ __forceinline__ int find_charge(int charge) const {
    constexpr int kLanes = 16;
    const int half = threadIdx.x % 32 / kLanes, lane = threadIdx.x % kLanes;
    int low = 0, step;
    for (int width = batch_; width > 1; width = step) {
      step = (width + kLanes - 1) / kLanes;
      const int at = low + lane * step;
      const bool reached = lane * step < width && at < batch_ && entries_[at].charge_before * teams_.heads <= charge;
      const unsigned votes = __ballot_sync(~0u, reached) >> half * kLanes & 0xffffu;
      low += (__popc(votes) - 1) * step;
    }
    return low;
  }

  // floor(team * total / teams); one each where there is less than one a team.
  __device__ __forceinline__ int even_share(int team) const {
    if (total_ < static_cast<int>(teams_.count.divisor)) return min(team, total_);
    uint32_t rest;
    const uint32_t quotient = teams_.count.divide(total_, rest);
    return team * quotient + teams_.count.divide(team * rest);
  }

  const Entry* entries_;
  int batch_;
  const Teams& teams_;
  int team_;
  uint32_t member_;
  bool deterministic_;
  int groups_;
  const Charge& charge_;
  int total_;
};

}  // namespace bicl::decode
