#pragma once

#include <cuda_runtime.h>

#include "../params.h"

namespace bicl {

// Writes rows of K and V to their slots. Input dtype: the pages' own, or any 16/32-bit one into fp8.
void store_kv(const StoreKvParams& params, cudaStream_t stream);

}  // namespace bicl
