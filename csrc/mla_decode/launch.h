#pragma once

#include <cuda_runtime.h>

#include "params.h"

namespace bicl {

// Bytes of partial results that a step with this many heads may need.
int64_t mla_workspace_bytes(int num_heads, int num_sms);
// Counters of a step.
int64_t mla_num_counters(int batch, int num_heads);

void mla_decode(const MlaDecodeParams& params, int device, cudaStream_t stream);

}  // namespace bicl
