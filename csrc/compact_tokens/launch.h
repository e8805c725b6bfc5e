#pragma once

#include <cuda_runtime.h>

#include "../params.h"

namespace bicl {

// Chosen tokens of one sequence, as they are stored, to the first slots of other pages.
void compact_tokens(const CompactTokensParams& params, cudaStream_t stream);

}  // namespace bicl
