// Shapes and the shared-memory plan of the wgmma kernel.
#pragma once

namespace bicl::prefill::sm90 {

constexpr int kConsumers = 2;                         // warpgroups of 64 rows each
constexpr int kThreads = 128 * (1 + kConsumers);      // warpgroup 0 loads
constexpr int kConsumerWarps = 4 * kConsumers;
constexpr int kQueryThreads = 96;                     // warps 1 to 3 of the loading warpgroup
constexpr int kPageKeys = 64;
// 168 registers a thread at entry (65536 / 384, in steps of 8): 56 * 128 + 224 * 256 = 168 * 384.
constexpr int kLoaderRegisters = 56;
constexpr int kConsumerRegisters = 224;

template <int D>
struct Config {
  // O takes D / 2 registers a thread and S takes kKeys / 2: at D > 128 only one page of keys fits.
  static constexpr int kKeys = D <= 128 ? 128 : 64;
  static constexpr int kPages = kKeys / kPageKeys;
  static constexpr int kDimTiles = D / 64;
  static constexpr int kStages = D <= 64 ? 4 : 2;  // more gain nothing at D = 128
  static constexpr int kQueryBuffers = D <= 192 ? 2 : 1;  // the next tile's Q loads behind this one

  static constexpr int kPageBytes = D * kPageKeys * 2;  // K or V of one page; also 64 rows of Q
  static constexpr int kStageBytes = kPages * kPageBytes;
  static constexpr int kQueryBytes = kConsumers * kPageBytes;

  static constexpr int kKeyOffset = kQueryBuffers * kQueryBytes;
  static constexpr int kValueOffset = kKeyOffset + kStages * kStageBytes;
  static constexpr int kControlOffset = kValueOffset + kStages * kStageBytes;
  static constexpr int kControlBytes = 1024;
  static constexpr int kSharedBytes = kControlOffset + kControlBytes;
};

}  // namespace bicl::prefill::sm90
