#pragma once

#include <cuda_runtime.h>

#include "../params.h"

namespace bicl {

// The gated activation of a feed-forward layer, from both of its products.
void swiglu(const SwigluParams& params, cudaStream_t stream);

}  // namespace bicl
