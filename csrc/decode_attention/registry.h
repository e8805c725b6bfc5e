// The kernels that were compiled in: each instantiation registers itself.
#pragma once

#include "../common/kernel_source.h"
#include "../params.h"

namespace bicl::decode {

struct KernelParams;

struct Variant {
  const char* family;  // "sm90" or "sm80"
  DType stored;
  int head_dim;        // D, padded
  int tile;
  int head_blocks;     // of 8 query heads
};

struct Kernel {
  Variant variant;
  KernelRef function;
  int threads;
  int groups;       // the stage count is a multiple of it
  int stage_bytes;
  int fixed_bytes;  // shared memory beside the ring and the prefix sums
  Charge charge;
  int vectors;      // of a result
  int results;      // vectors that a CTA of a cluster has room for
};

void register_kernel(const Kernel& kernel);
const Kernel* find_kernel(const Variant& variant);

struct Registration {
  explicit Registration(const Kernel& kernel) { register_kernel(kernel); }
};

}  // namespace bicl::decode
