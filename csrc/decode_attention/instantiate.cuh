// One line makes one kernel and registers it: BICL_DECODE(sm90, Sm90Loader, __half, kFloat16, 128, 64, 1)
#pragma once

#include "kernel.cuh"
#include "registry.h"

#define BICL_DECODE(family, Loader, Stored, dtype, head_dim, tile, head_blocks)                            \
  namespace bicl::decode {                                                                                 \
  namespace {                                                                                              \
  using Traits##head_blocks = Traits<Loader, Stored, head_dim, tile, head_blocks>;                         \
  const Registration registration##head_blocks({{#family, DType::dtype, head_dim, tile, head_blocks},      \
                                                kernel_ref<decode_kernel<Traits##head_blocks>>(),          \
                                                Traits##head_blocks::kThreads,                             \
                                                Traits##head_blocks::kGroups,                              \
                                                Traits##head_blocks::kStageBytes,                          \
                                                SharedPlan<Traits##head_blocks>::kRing,                    \
                                                Traits##head_blocks::kCharge,                              \
                                                Traits##head_blocks::kVectors,                             \
                                                Traits##head_blocks::kResults});                           \
  }                                                                                                        \
  }
