#pragma once

#include <cuda_runtime.h>

#include "../params.h"

namespace bicl {

// Pages to token-major rows of K and V. Output dtype: the pages' own (unscaled), or fp32, fp16 or bf16 (scaled).
void gather(const GatherParams& params, cudaStream_t stream);

}  // namespace bicl
