// Shapes and the shared-memory plan of the wgmma kernel.
#pragma once

#include <cuda_fp16.h>

#include <type_traits>

namespace bicl::prefill::sm90 {

constexpr int kConsumers = 2;                         // warpgroups of 64 rows each
constexpr int kThreads = 128 * (1 + kConsumers);      // warpgroup 0 loads
constexpr int kConsumerWarps = 4 * kConsumers;
constexpr int kQueryThreads = 96;                     // warps 1 to 3 of the loading warpgroup
constexpr int kPageKeys = 64;
constexpr int kQueryBarrier = 3;                      // first of kAssignments named barriers; 1 and 2 are turns
constexpr int kAssignments = 4;                       // tickets between the loader and the slowest consumer
template <typename KV, int D>
struct Config {
  static constexpr bool kWiden = sizeof(KV) == 1;  // fp8 pages are multiplied as fp16
  // 168 registers a thread at entry (65536 / 384, in steps of 8), given from the loaders to the consumers.
  static constexpr int kLoaderRegisters = 56;
  static constexpr int kConsumerRegisters = (168 * 3 - kLoaderRegisters) / 2;
  template <typename E>
  using Operand = std::conditional_t<kWiden, __half, E>;  // of queries of type E

  // O takes D / 2 registers a thread and S takes kKeys / 2: at D > 128 only one page of keys fits.
  static constexpr int kKeys = D <= 128 ? 128 : 64;
  static constexpr int kPages = kKeys / kPageKeys;
  static constexpr int kDimTiles = D / 64;
  static constexpr int kStages = D <= 64 ? 3 : 2;  // more gain nothing
  static constexpr int kQueryBuffers = D <= 192 ? 2 : 1;  // the next tile's Q loads behind this one

  static constexpr int kPageBytes = D * kPageKeys * 2;  // K or V of one page; also 64 rows of Q
  static constexpr int kStageBytes = kPages * kPageBytes;
  static constexpr int kQueryBytes = kConsumers * kPageBytes;

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
