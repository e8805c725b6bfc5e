#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../params.h"

namespace bicl {

// One query token a sequence over its cached keys. Grid and variant depend on host-known sizes alone (batch,
// heads, card), never on the lengths: safe to capture. `plan`: of plan_decode(), or null.
void decode_attention(const DecodeParams& params, const void* plan, int64_t plan_bytes, int device,
                      cudaStream_t stream);

// Works out on the device, once a step, what decode_attention() of every layer with the same heads, dtype, window and
// page table would find out anew. Of `params` only what does not differ between such layers is read.
void plan_decode(const DecodeParams& params, void* plan, int64_t plan_bytes, int device, cudaStream_t stream);

// Bytes of any plan for such a batch.
int64_t decode_plan_bytes(int batch);

// Bytes of workspace that any call on such pages needs, whatever the batch.
int64_t decode_workspace_bytes(int padded_head_dim, int group, bool deterministic, int num_sms);

}  // namespace bicl
