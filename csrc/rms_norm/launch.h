#pragma once

#include <cuda_runtime.h>

#include "../params.h"

namespace bicl {

// Rows over their root mean square, weighted.
void rms_norm(const RmsNormParams& params, cudaStream_t stream);

}  // namespace bicl
