// The kernels that were compiled in: each instantiation registers its launcher.
#pragma once

#include <cuda_runtime.h>

#include "params.h"

namespace bicl::prefill {

enum class Family { kSm90, kMma };

using Launcher = void (*)(const PrefillParams& params, int num_ctas, cudaStream_t stream);

struct Variant {
  Family family;
  DType query;
  DType stored;
  int padded_head_dim;
  int tile;  // of kSm90's kernels, whose pages are as long; 0 for kMma's, which take any
};

void register_launcher(const Variant& variant, Launcher launcher);

struct Registration {
  Registration(const Variant& variant, Launcher launcher) { register_launcher(variant, launcher); }
};

}  // namespace bicl::prefill
