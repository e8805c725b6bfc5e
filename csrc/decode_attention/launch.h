#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../params.h"

namespace bicl {

// One query token a sequence over its cached keys. Grid and variant depend on host-known sizes alone (batch,
// heads, card), never on the lengths: safe to capture.
void decode_attention(const DecodeParams& params, int device, cudaStream_t stream);

// Bytes of workspace that any call on such pages needs, whatever the batch.
int64_t decode_workspace_bytes(int padded_head_dim, int group, bool deterministic, int num_sms);

}  // namespace bicl
