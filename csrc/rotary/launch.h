#pragma once

#include <cuda_runtime.h>

#include "../params.h"

namespace bicl {

// Rotary embedding of query and key, in place.
void rotate(const RotaryParams& params, cudaStream_t stream);

}  // namespace bicl
