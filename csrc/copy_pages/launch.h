#pragma once

#include <cuda_runtime.h>

#include "../params.h"

namespace bicl {

// Copies whole pages in every layer, in one launch.
void copy_pages(const CopyPagesParams& params, cudaStream_t stream);

}  // namespace bicl
