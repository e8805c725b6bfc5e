#pragma once

#include <cuda_runtime.h>

#include "../params.h"

namespace bicl {

// Copies a decode step's inputs to where a captured graph reads them, in one launch.
void stage_step(const StageStepParams& params, cudaStream_t stream);

}  // namespace bicl
