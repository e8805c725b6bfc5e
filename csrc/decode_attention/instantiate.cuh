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

// The same over pages that it chooses by so many centroids of each: BICL_SPARSE_DECODE(__half, kFloat16, 128, 64, 8)
#define BICL_SPARSE_DECODE(Stored, dtype, head_dim, tile, centroids)                                       \
  namespace bicl::decode {                                                                                 \
  namespace {                                                                                              \
  using SparseTraits = Traits<Sm90Loader, Stored, head_dim, tile, 1>;                                      \
  const Registration sparse_registration({{"sparse", DType::dtype, head_dim, tile, 1},                     \
                                          kernel_ref<sparse_decode_kernel<SparseTraits, centroids>>(),     \
                                          SparseTraits::kThreads + 32 * ChosenPages<centroids>::kWarps,    \
                                          SparseTraits::kGroups,                                           \
                                          SparseTraits::kStageBytes,                                       \
                                          SharedPlan<SparseTraits>::kRing,                                 \
                                          SparseTraits::kCharge,                                           \
                                          SparseTraits::kVectors,                                          \
                                          SparseTraits::kResults});                                        \
  }                                                                                                        \
  }
