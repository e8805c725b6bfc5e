#pragma once

#include <cuda_runtime.h>

#include "../mla_decode/params.h"

namespace bicl {

// Writes latents to their slots; 16 bits are copied as they are.
void store_latent(const StoreLatentParams& params, cudaStream_t stream);

}  // namespace bicl
