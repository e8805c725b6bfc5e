#pragma once

#include <cuda_runtime.h>

#include "../params.h"

namespace bicl {

// The fp8 pages of a step's sequences as 16-bit pages, one sequence behind the other.
void widen_pages(const WidenPagesParams& params, cudaStream_t stream);

}  // namespace bicl
