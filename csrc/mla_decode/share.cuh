// Who computes what: the tiles of all sequences stand in a line, of which each team of CTAs takes an equal piece. A
// team's CTAs read the same tiles side by side, each for other heads.
#pragma once

#include "params.h"

namespace bicl::mla {

constexpr int kTileKeys = 64;

// A sequence in the line: its first tile, and the keys of its last one (0: it has none).
class Entries {
 public:
  __device__ __forceinline__ Entries(int* memory, int batch) : memory_(memory), batch_(batch) {}

  // By one warp; `lane` of it.
  __device__ __forceinline__ void build(const int32_t* lengths, int lane) const {
    const int each = (batch_ + 31) / 32;
    const int begin = min(lane * each, batch_), end = min(begin + each, batch_);
    int sum = 0;
#pragma unroll 4
    for (int b = begin; b < end; ++b) sum += tiles_of(lengths[b]);
    int before = sum;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int left = __shfl_up_sync(~0u, before, distance);
      if (lane >= distance) before += left;
    }
    const int total = __shfl_sync(~0u, before, 31);
    before -= sum;
#pragma unroll 4
    for (int b = begin; b < end; ++b) {
      const int length = lengths[b];
      memory_[b] = before << kKeyBits | (length > 0 ? (length - 1) % kTileKeys + 1 : 0);
      before += tiles_of(length);
    }
    if (lane == 0) memory_[batch_] = total << kKeyBits;
  }

  __device__ __forceinline__ int first_tile(int sequence) const { return memory_[sequence] >> kKeyBits; }
  __device__ __forceinline__ int total() const { return first_tile(batch_); }
  __device__ __forceinline__ bool empty(int sequence) const { return (memory_[sequence] & kKeyMask) == 0; }
  __device__ __forceinline__ int keys(int sequence, int tile) const {
    return tile + 1 == first_tile(sequence + 1) ? memory_[sequence] & kKeyMask : kTileKeys;
  }

  // The next one that has tiles.
  __device__ __forceinline__ int next(int sequence) const {
    do ++sequence;
    while (empty(sequence));
    return sequence;
  }

  // Of a tile of the line.
  __device__ __forceinline__ int sequence_of(int tile) const {
    int low = 0, high = batch_;  // first_tile(low) <= tile < first_tile(high)
    while (low + 1 < high) {
      const int middle = (low + high) / 2;
      if (first_tile(middle) <= tile) low = middle;
      else high = middle;
    }
    return low;
  }

 private:
  static constexpr int kKeyBits = 7, kKeyMask = (1 << kKeyBits) - 1;

  __device__ __forceinline__ static int tiles_of(int length) { return (max(length, 0) + kTileKeys - 1) / kTileKeys; }

  int* memory_;
  int batch_;
};

// The pieces of the line, none of them empty. Products stay below 2^32: at most 256 teams, and as many tiles as an
// entry can tell apart.
class Teams {
 public:
  __device__ __forceinline__ Teams(int most, int total) : count_(min(most, total)), total_(total) {}

  // First tile of a team; of those that get none: the line's end.
  __device__ __forceinline__ int begin(int team) const {
    return team < static_cast<int>(count_) ? static_cast<uint32_t>(team) * total_ / count_ : total_;
  }
  __device__ __forceinline__ int owner(int tile) const {
    return ((static_cast<uint32_t>(tile) + 1) * count_ - 1) / total_;
  }

 private:
  uint32_t count_, total_;
};

}  // namespace bicl::mla
