// Shapes and the shared-memory plan of the wgmma kernel.
#pragma once

#include <cuda_fp16.h>

#include <type_traits>

namespace bicl::prefill::sm90 {

constexpr int kConsumers = 2;                         // warpgroups of 64 rows each
constexpr int kThreads = 128 * (1 + kConsumers);      // warpgroup 0 loads
constexpr int kConsumerWarps = 4 * kConsumers;
constexpr int kQueryThreads = 96;                     // warps 1 to 3 of the loading warpgroup
constexpr int kQueryBarrier = 3;                      // first of kAssignments named barriers; 1 and 2 are turns
constexpr int kAssignments = 4;                       // tickets between the loader and the slowest consumer

// Pages of kTile tokens, whose tiles are kTile x kTile of KV and wgmma's operands as they are stored.
template <typename KV, int D, int kTile>
struct Config {
  static_assert(kTile == 64 || (kTile == 32 && sizeof(KV) == 2));
  using Stored = KV;
  static constexpr int kHeadDim = D;
  static constexpr bool kWiden = sizeof(KV) == 1;  // fp8 pages are multiplied as fp16
  // 168 registers a thread at entry (65536 / 384, in steps of 8), given from the loaders to the consumers.
  static constexpr int kLoaderRegisters = 56;
  static constexpr int kConsumerRegisters = (168 * 3 - kLoaderRegisters) / 2;
  template <typename E>
  using Operand = std::conditional_t<kWiden, __half, E>;  // of queries of type E

  // O takes D / 2 registers a thread and S takes kKeys / 2: at D > 128 only 64 keys fit.
  static constexpr int kKeys = D <= 128 ? 128 : 64;
  static constexpr int kPageKeys = kTile;
  static constexpr int kPages = kKeys / kPageKeys;
  static constexpr int kDimTiles = D / kTile;
  static constexpr int kRowBytes = kTile * 2;  // of a tile of K or V as an operand
  static constexpr int kStages = D <= 64 ? 3 : 2;  // more gain nothing
  static constexpr int kQueryBuffers = D <= 192 ? 2 : 1;  // the next tile's Q loads behind this one

  static constexpr int kPageBytes = D * kPageKeys * 2;  // K or V of one page
  static constexpr int kStageBytes = kPages * kPageBytes;
  static constexpr int kQueryTiles = (D + 63) / 64;  // of 64 x 64, whatever those of K and V
  static constexpr int kConsumerQueryBytes = kQueryTiles * 64 * 128;
  static constexpr int kQueryBytes = kConsumers * kConsumerQueryBytes;

  static constexpr int kKeyOffset = kQueryBuffers * kQueryBytes;
  static constexpr int kValueOffset = kKeyOffset + kStages * kStageBytes;
  static constexpr int kRawStages = 2;  // blocks of K or V as they were stored
  static constexpr int kRawBytes = kWiden ? kStageBytes / 2 : 0;
  static constexpr int kRawOffset = kValueOffset + kStages * kStageBytes;
  static constexpr int kControlOffset = kRawOffset + kRawStages * kRawBytes;
  static constexpr int kControlBytes = 1024;
  static constexpr int kSharedBytes = kControlOffset + kControlBytes;
};

}  // namespace bicl::prefill::sm90
