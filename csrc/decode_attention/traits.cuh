// Compile-time shape of one decode kernel: what is stored, what the tensor cores multiply, who does what.
#pragma once

#include "../common/layout.cuh"
#include "../common/numeric.cuh"
#include "../common/ptx.cuh"
#include "kernel_params.h"

namespace bicl::decode {

constexpr int kBlockKeys = 64;  // keys a ring stage holds: one page of 64 tokens or two of 32
constexpr int kWarpKeys = 32;   // keys one warp takes of a block
constexpr float kLowest = -1e30f;  // start of a running maximum; finite, so that differences stay numbers
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// 16-bit elements are multiplied as they are, fp8 as fp16 (exact).
template <typename Stored>
struct ComputeOf {
  using type = Stored;
};
template <>
struct ComputeOf<__nv_fp8_e4m3> {
  using type = __half;
};
template <>
struct ComputeOf<__nv_fp8_e5m2> {
  using type = __half;
};

// Four warps keep up with the copies. fp8 blocks arrive twice as fast and cost more instructions: twice the warps,
// where registers allow. Cards before Hopper may have 99 KiB of shared memory: wide ones get by with two.
constexpr int consumer_warps(bool hopper, int bytes, int head_dim, int head_blocks) {
  if (hopper) return bytes == 1 && head_blocks == 1 && head_dim <= 128 ? 8 : 4;
  return head_dim > 128 || (head_dim == 128 && head_blocks == 2) ? 2 : 4;
}

template <typename Loader_, typename Stored_, int kHeadDim_, int kTile_, int kHeadBlocks_>
struct Traits {
  using Loader = Loader_;
  using Stored = Stored_;
  using Compute = typename ComputeOf<Stored>::type;
  static constexpr int kHeadDim = kHeadDim_;        // D, padded
  static constexpr int kTile = kTile_;              // T
  static constexpr int kHeadBlocks = kHeadBlocks_;  // blocks of 8 query heads a CTA serves (N = 8 each)
  static constexpr int kHeads = 8 * kHeadBlocks;
  static constexpr int kBytes = sizeof(Stored);
  static constexpr bool kFp8 = kBytes == 1;
  static constexpr int kConsumerWarps = consumer_warps(Loader::kClusters, kBytes, kHeadDim, kHeadBlocks);
  static constexpr int kConsumers = 32 * kConsumerWarps;
  static constexpr int kThreads = kConsumers + 32;
  // Two warps share a block; block i of a unit belongs to group i % kGroups. A stage must never change
  // its group (a one-bit parity wait could pass a phase early), so kGroups divides the stage count.
  static constexpr int kGroups = kConsumerWarps / 2;
  // The queries of the next segments are copied into shared memory ahead: while pages stream, memory answers late.
  static constexpr int kQuerySlots = Loader::kClusters ? 3 : 1;
  static constexpr int kQueryStride = kHeadDim + (kFp8 ? 16 : 8);  // elements a row; more than D: no bank conflicts
  static constexpr int kQueryBytes = kHeads * kQueryStride * 2;    // of a slot
  // Fragments live in registers where they fit beside the accumulators, else they are read again for every block.
  static constexpr bool kQueryShared = kHeadBlocks * kHeadDim >= 192 || (kConsumerWarps == 8 && kHeadDim > 64);
  static constexpr int kRowBytes = kTile * kBytes;
  static constexpr int kTileBytes = kTile * kRowBytes;
  static constexpr int kDimTiles = kHeadDim / kTile;
  static constexpr int kStageBytes = 2 * kBlockKeys * kHeadDim * kBytes;
  // The end of a head hides behind the copies that follow, but of the shortest heads, and takes as long as this copy.
  // That of fp8 never hides: its blocks arrive twice as fast and are more work.
  static constexpr Charge kCharge = kFp8 ? Charge{32 * 1024 / kStageBytes, 0} : Charge{0, 112 * 1024 / kStageBytes};
  static constexpr int kMergeStride = kHeadDim + 4;  // floats; + 4 keeps the accumulator stores conflict-free
  static constexpr int kMergeFloats = kConsumerWarps * kHeads * kMergeStride;
  static constexpr int kVectors = kHeads * kHeadDim / 4;                          // float4 of one result
  // Units a CTA of a full cluster (8) may push to its peers in deterministic mode, where there is room.
  static constexpr int kUnitParts = Loader::kClusters && kHeadBlocks == 1 && kHeadDim != 192 ? 2 : 1;
  static constexpr int kResults = kUnitParts * (kVectors + 8);                    // float4 kept or pushed
  static constexpr int kPartialFloats = kHeads * kHeadDim + 2 * kHeads;           // one workspace slot
};

// Shared memory. What has a fixed size comes first, so that its addresses are constants; then the ring, then
// the sequences' entries.
template <typename T>
struct SharedPlan {
  static constexpr int kMaxStages = 16;
  static constexpr int kStats = T::kMergeFloats * 4;                         // float2 [warp][head]
  static constexpr int kResultStats = kStats + T::kConsumerWarps * T::kHeads * 8;  // float2 beside each float4 of
  static constexpr int kResult = kResultStats + T::kResults * 8;
  // Query slot 0; the others lie before it, on results that only clusters have, which need a single slot.
  static constexpr int kQuery = kResult + (T::kResults * 16 > T::kVectors * 16 + (T::kQuerySlots - 1) * T::kQueryBytes
                                               ? T::kResults * 16
                                               : T::kVectors * 16 + (T::kQuerySlots - 1) * T::kQueryBytes);
  static constexpr int kBarriers = kQuery + T::kQueryBytes;                  // full, empty of each stage
  static constexpr int kScalars = kBarriers + kMaxStages * 16 + 16;          // one more barrier: peers' results
  static constexpr int kRing = (kScalars + 16 + 127) / 128 * 128;
};

}  // namespace bicl::decode
