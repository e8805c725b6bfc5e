#pragma once

#include <cuda_runtime.h>

#include "../params.h"

namespace bicl {

// Rotary embedding of query in place, and of key on its way to the pages, where value goes as it is.
void rotate_and_store(const RotateAndStoreParams& params, cudaStream_t stream);

}  // namespace bicl
