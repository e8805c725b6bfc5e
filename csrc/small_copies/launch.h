#pragma once

#include <cuda_runtime.h>

#include "../params.h"

namespace bicl {

// Copies a few small pieces between device memory and page-locked memory of the host, past the copy engines.
void small_copies(const SmallCopiesParams& params, cudaStream_t stream);

}  // namespace bicl
