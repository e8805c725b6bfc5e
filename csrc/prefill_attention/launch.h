#pragma once

#include "../common/launch.h"
#include "params.h"

namespace bicl {

// Bytes of workspace for steps of at most `num_tokens` query tokens in `batch` sequences.
int64_t prefill_workspace_bytes(int num_tokens, int batch, int group_size, int padded_head_dim, int num_ctas);

// Where everything lies in a workspace of the size above.
PrefillPlan plan_view(void* workspace, int num_tokens, int batch, int group_size, int padded_head_dim, int num_ctas);

// Writes the tile list of one step: which rows, which keys, in which order, split or not.
void plan_prefill(const PrefillPlanParams& params, cudaStream_t stream);

// Whether the wgmma kernel takes these pages on this card; it also understands split tiles.
bool prefill_uses_sm90(const Pages& pages, const DeviceInfo& device);

// Attention of packed queries over pages, by the tile list in `params.plan`.
void prefill_attention(const PrefillParams& params, bool force_sm80, int device, cudaStream_t stream);

}  // namespace bicl
