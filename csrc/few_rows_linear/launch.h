#pragma once

#include <cuda_runtime.h>

#include "../params.h"

namespace bicl {

constexpr int kFewRows = 16;

// The product of a decode step's few rows with a weight.
void few_rows_linear(const FewRowsLinearParams& params, cudaStream_t stream);

}  // namespace bicl
