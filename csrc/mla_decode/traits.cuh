// Sizes of one kernel, and where things lie in its shared memory.
#pragma once

#include "share.cuh"

namespace bicl::mla {

constexpr float kLn2 = 0.6931471805599453f;
constexpr int kWarpgroups = 2;
constexpr int kConsumers = kWarpgroups * 128;
constexpr int kTileBytes = 64 * 128;       // 64 tokens of 64 dims
constexpr int kDimTiles = kLatentDim / 64;  // of a page
constexpr int kStageTiles = 3;             // of a page, one bulk copy
constexpr int kStagesPage = kDimTiles / kStageTiles;
constexpr int kStageBytes = kStageTiles * kTileBytes;
constexpr int kValueTiles = kValueDim / 64 / kWarpgroups;  // of a warpgroup
constexpr int kMaxSharedBytes = 227 * 1024;
constexpr int kMaxParts = 256;  // of a sequence: CTAs at most

template <typename ElementType, int kHeadCount>
struct Traits {
  using Element = ElementType;
  static constexpr int kHeads = kHeadCount;      // of a CTA
  static constexpr int kOwnHeads = kHeads / 2;   // whose softmax a warpgroup computes
  static constexpr int kBlocks = kHeads / 8;     // of 8 heads
  static constexpr int kOwnBlocks = kOwnHeads / 8;
  // Wide outputs take more registers than an equal share: the producer gives up its own, which a whole warpgroup must do.
  static constexpr bool kMoveRegisters = kHeads > 16;
  static constexpr int kThreads = kConsumers + (kMoveRegisters ? 128 : 64);
  // Scores are summed in so many accumulators: products of few columns end sooner than the next may add to them.
  static constexpr int kChains = kHeads == 16 ? 3 : kHeads == 32 ? 2 : 1;
  static constexpr int kQueryTile = kHeads * 128;  // bytes of 64 dims
  static constexpr int kPartFloats = kHeads * kValueDim + 2 * kHeads;  // of a partial result: output, (maximum, sum)

  static constexpr int kQueryBytes = kDimTiles * kQueryTile;
  static constexpr int kWeightBytes = kHeads * 128;  // probabilities of a tile
  static constexpr int kBarrierBytes = 256;
  static constexpr int kStatsBytes = (4 + 1 + 1) * kHeads * 4;  // per-warp maxima or sums, then references, factors
  static constexpr int kExchangeBytes = kWarpgroups * kOwnBlocks * 128 * 16;  // sums of scores for the other warpgroup
  static constexpr int kEntryBytes = (kMlaMaxBatch + 1) * 4;
  static constexpr int kFixedBytes = kQueryBytes + kWeightBytes + kExchangeBytes + kBarrierBytes + kStatsBytes + kEntryBytes;
  static constexpr int kStages = (kMaxSharedBytes - kFixedBytes) / kStageBytes;

  static constexpr int kRing = 0;
  static constexpr int kQuery = kRing + kStages * kStageBytes;
  static constexpr int kWeights = kQuery + kQueryBytes;
  static constexpr int kExchange = kWeights + kWeightBytes;
  static constexpr int kBarriers = kExchange + kExchangeBytes;
  static constexpr int kStats = kBarriers + kBarrierBytes;
  static constexpr int kEntries = kStats + kStatsBytes;
  static constexpr int kSharedBytes = kEntries + kEntryBytes;

  static_assert(kStages > kStagesPage && 2 * kStages * 8 <= kBarrierBytes, "a page and more must fit the ring");
};

}  // namespace bicl::mla
